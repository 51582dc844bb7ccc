"""One function for every policy: budgets, deadlines, interrupts, and the comparison."""

import functools
import importlib
import os
import signal
import threading
import time
from dataclasses import replace
from types import SimpleNamespace

import numpy as np
import pytest

from cswap.errors import BudgetError, ConfigError
from cswap.plan import planner
from cswap.plan.hardware import Hardware
from cswap.plan.policy_tools.problem import Problem
from cswap.plan.policy_tools.search import Best, interruptible, penalised_s
from cswap.plan.simulate import Simulator, smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.schema.trace import Trace, TraceOperator, TraceTensor

MACHINE = Hardware("test", 1 << 40, {}, 1e12, 1e6, 1e6)


def chain(n=6, nbytes=1_000_000):
    tensors = [TraceTensor(nbytes, saved=i) for i in range(n)] + [TraceTensor(0)]
    operators = [TraceOperator("data", "other", "forward", 1.0, (), (0,))]
    operators += [
        TraceOperator(f"f{i}", "linear", "forward", 1.0, (i,), (i + 1,)) for i in range(n)
    ]
    operators += [
        TraceOperator(f"b{i}", "linear", "backward", 1.0, (i,), ()) for i in reversed(range(n))
    ]
    return Trace(tuple(operators), tuple(tensors), name="chain")


FULL = max(live_bytes(chain()))


@functools.cache
def floor():
    """Bytes below which no plan exists. Not at import: its loops are compiled, which takes long."""
    return smallest_feasible_budget(chain(), MACHINE)


def all_swapped(problem):
    simulator = problem.simulator
    swap = np.ones(len(simulator.saved), np.int8)
    return simulator.to_plan(swap, np.zeros_like(swap))


def test_compilation_is_not_planning(policies, monkeypatch):
    clock = SimpleNamespace(now_s=0.0, compiled_s=3.0)
    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    monkeypatch.setattr(planner, "compile_s", lambda: clock.compiled_s)

    def solve(problem):
        clock.now_s, clock.compiled_s = 7.0, 8.0
        return all_swapped(problem)

    policies("slow", solve)
    (row,) = planner.compare(chain(), MACHINE, FULL, ["slow"])
    assert row.planning_s == 2.0


def test_the_time_limit_begins_after_the_simulator_is_compiled(policies, monkeypatch):
    clock = SimpleNamespace(now_s=0.0)

    def simulate(*arguments):
        clock.now_s += 10.0
        return Simulator  # of no interest

    seen = []

    def solve(problem):
        seen.append(problem.deadline)
        return all_swapped(problem)

    policies("any", solve)
    planner._compiled.clear()
    monkeypatch.setattr(planner, "time", SimpleNamespace(monotonic=lambda: clock.now_s))
    with monkeypatch.context() as patch:
        patch.setattr(planner, "simulate", simulate)
        planner._problem(chain(), MACHINE, None, 0, 1.0, True, None)
    assert clock.now_s == 10.0
    assert planner.plan(chain(), MACHINE, FULL, "any", time_limit=1.0).policy == "any"
    assert seen == [11.0]


@pytest.fixture
def policies(monkeypatch):
    """Policies that exist for the test only, by name."""
    modules = {}

    def add(name, solve):
        monkeypatch.setitem(planner.POLICIES, name, name)
        modules[name] = SimpleNamespace(solve=solve)

    real = importlib.import_module

    def fake(name, package=None):  # Numba imports modules of its own at a first compilation
        return modules.get(name) or real(name, package)

    monkeypatch.setattr(importlib, "import_module", fake)
    return add


def test_none_keeps_everything_if_it_fits():
    made = planner.plan(chain(), MACHINE, FULL, "none")
    assert {d.action for d in made.decisions.values()} == {"keep"}
    assert len(made.decisions) == 6
    assert made.policy == "none"
    assert made.predicted["peak_bytes"] == FULL
    assert made.trace_fingerprint


def test_too_small_a_budget_names_the_smallest():
    with pytest.raises(BudgetError) as caught:
        planner.plan(chain(), MACHINE, floor() - 1, "none")
    assert caught.value.smallest_bytes == floor()
    assert str(floor()) in str(caught.value)


def test_a_policy_that_finds_no_plan_says_so():
    with pytest.raises(BudgetError, match=r"'none' found no plan .*device memory") as caught:
        planner.plan(chain(), MACHINE, FULL - 1, "none")
    assert caught.value.smallest_bytes == floor()


WRONG = [
    ({"policy": "vdnn-al"}, "Did you mean 'vdnn-all'"),
    ({"budget": 0}, "budget=0"),
    ({"budget": 1.5}, "budget=1.5"),
    ({"time_limit": 0}, "time_limit=0"),
    ({"time_limit": float("nan")}, "time_limit=nan"),
    ({"hardware": "abacus"}, "hardware='abacus'"),
    ({"trace": {}}, "trace.format=None"),
]


@pytest.mark.parametrize(("change", "message"), WRONG, ids=[row[1] for row in WRONG])
def test_wrong_arguments_are_named(change, message):
    arguments = {"trace": chain(), "hardware": MACHINE, "budget": FULL, "policy": "none"}
    with pytest.raises(ConfigError) as caught:
        planner.plan(**(arguments | change))
    assert message in str(caught.value)


def test_a_trace_estimated_for_another_machine_is_refused():
    trace = replace(chain(), source="estimated", hardware="v100-pcie3")
    for call in (planner.plan, planner.compare):
        with pytest.raises(ConfigError, match=r"estimated for that machine, not for 'h200-pcie5'"):
            call(trace, "h200-pcie5")
    with pytest.raises(ConfigError, match=r"trace\.hardware='an old profile'"):
        planner.plan(replace(trace, hardware="an old profile"), "h200-pcie5")
    assert planner.plan(trace, "v100-pcie3", policy="none").policy
    assert planner.plan(
        trace, "v100-pcie3-cswap", policy="none"
    ).policy  # another link, the same GPU
    assert planner.plan(
        replace(trace, source="measured", hardware="Tesla V100"), MACHINE, FULL
    ).policy


def test_compare_has_a_row_for_each_policy_and_ranks_by_step_time(policies):
    policies("all", all_swapped)
    seen = []
    rows = planner.compare(
        chain(), MACHINE, floor(), ["none", "all"],
        progress=lambda fraction, text: seen.append((fraction, text)),
    )  # fmt: skip
    none, swapped = rows
    assert [row.policy for row in rows] == ["none", "all"]
    assert none.plan is None
    assert none.slowdown == float("inf")
    assert "device memory" in none.error
    assert swapped.simulation is not None
    assert swapped.simulation.feasible
    assert swapped.slowdown > 1.0
    assert swapped.slowdown == pytest.approx(swapped.simulation.step_s / 13.0)


def test_compare_reports_progress_over_all_policies(policies):
    def solve(problem):
        problem.report(0.5, "half")
        return all_swapped(problem)

    policies("a", solve)
    policies("b", solve)
    seen = []
    planner.compare(chain(), MACHINE, floor(), ["a", "b"], progress=lambda *row: seen.append(row))
    assert seen == [(0.25, "a: half"), (0.75, "b: half")]


def test_time_limit_stops_a_search(policies):
    def solve(problem):
        while not problem.stopped():
            time.sleep(0.001)
        return all_swapped(problem)

    policies("endless", solve)
    began = time.monotonic()
    assert planner.plan(chain(), MACHINE, floor(), "endless", time_limit=0.05).policy == "endless"
    assert time.monotonic() - began < 5


def test_interrupt_returns_the_best_so_far_and_stops_a_comparison(policies):
    before = signal.getsignal(signal.SIGINT)

    def solve(problem):
        os.kill(os.getpid(), signal.SIGINT)
        while not problem.stopped():
            time.sleep(0.001)
        return all_swapped(problem)

    policies("endless", solve)
    rows = planner.compare(chain(), MACHINE, floor(), ["endless", "none"])
    assert [row.policy for row in rows] == ["endless"]
    assert rows[0].plan is not None
    assert signal.getsignal(signal.SIGINT) is before
    with pytest.raises(KeyboardInterrupt):
        planner.compare(chain(), MACHINE, floor(), ["endless", "none"], stoppable=False)
    with pytest.raises(KeyboardInterrupt):
        planner.plan(chain(), MACHINE, floor(), "endless", stoppable=False)


def test_second_interrupt_raises():
    problem = Problem(chain(), MACHINE, FULL)

    def interrupt_twice():
        with interruptible(problem):
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGINT)
                time.sleep(0.01)

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # a job may run without it
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupt_twice()
    finally:
        signal.signal(signal.SIGINT, before)
    assert problem.stopped()


def test_interruptible_does_nothing_in_another_thread():
    done = []

    def work():
        with interruptible(Problem(chain(), MACHINE, FULL)):
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done == [True]


def test_a_seed_and_a_problem_reach_the_policy(policies):
    seen = []

    def solve(problem):
        seen.append((problem.seed, problem.budget_bytes, problem.deadline))
        return all_swapped(problem)

    policies("spy", solve)
    planner.plan(chain().to_dict(), MACHINE.to_dict(), floor(), "spy", seed=7)
    assert seen == [(7, floor(), None)]


def test_no_infeasible_candidate_beats_a_feasible_one():
    simulator = Simulator(chain(), MACHINE, floor())
    best, n = Best(simulator), len(simulator.saved)
    starts = simulator.backward.astype(np.int32)
    keep, swap = np.zeros(n, np.int8), np.ones(n, np.int8)
    codec = np.zeros(n, np.int8)
    bad = best.consider(keep, codec, starts)
    one = keep.copy()
    one[0] = 1
    assert best.consider(one, codec, starts) < bad  # fewer bytes over budget
    good = best.consider(swap, codec, starts)
    assert good < simulator.worst_s < bad
    assert best.evaluations == 3
    np.testing.assert_array_equal(best.action, swap)
    assert penalised_s(simulator.run(swap, codec, starts), simulator) == good == best.cost_s
