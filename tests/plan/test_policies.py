"""The policies: against exhaustive search, against each other, and when they must stop early."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from dataclasses import replace

import numpy as np
import pytest

from cswap.codecs.traits import CodecRate
from cswap.errors import BudgetError
from cswap.plan import planner
from cswap.plan.hardware import Hardware
from cswap.plan.policies import home
from cswap.plan.policy_tools.problem import Problem
from cswap.plan.policy_tools.search import penalised_s
from cswap.plan.policy_tools.swap_ilp import Program, Ways, least_stall
from cswap.plan.policy_tools.vdnn import inputs_of, prefetch_points
from cswap.plan.simulate import Simulator, simulate, smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.schema.plan import Decision, Plan
from cswap.schema.trace import Trace, TraceOperator, TraceTensor

MIB = 1 << 20
MACHINE = Hardware(
    "test",
    1 << 40,
    {},
    1e12,
    1e9,
    1e9,
    codec_tax=0.5,
    codecs={"zvc": CodecRate(1e10, 1e10, 0.0), "int8": CodecRate(5e9, 5e9, 0.0)},
)
SLOW_CODECS = replace(
    MACHINE,
    codec_tax=0.0,
    codecs={"zvc": CodecRate(5e8, 5e8, 0.0), "int8": CodecRate(2.5e8, 2.5e8, 0.0)},
)
"""Codecs that take nothing from the computation; tensors wait for them all the same."""
SEARCHED = [name for name in planner.POLICIES if name != "none"]


def network(rng, n, kinds=("conv", "activation", "pool", "linear")):
    """A chain of layers whose inputs are saved, of random sizes, times and ratios."""
    tensors, operators = [], []
    for i in range(n + 1):
        saved = i if i < n else -1
        ratios = {"zvc": float(rng.uniform(1, 4)), "int8": 3.9}
        tensors.append(
            TraceTensor(
                int(rng.integers(1, 64)) * MIB // 4,
                saved=saved,
                role="activation" if i else "input",
                module=f"layers.{i}",
                ratios=ratios,
                profile={"zero_fraction": float(rng.uniform(0, 0.9))},
            )
        )
    for i in range(n):
        seconds = float(rng.uniform(1e-3, 3e-2))
        kind = kinds[int(rng.integers(len(kinds)))]
        operators.append(TraceOperator(f"f{i}", kind, "forward", seconds, (i,), (i + 1,)))
    for i in reversed(range(n)):
        seconds = float(rng.uniform(2e-3, 6e-2))
        kind = operators[i].kind
        operators.append(TraceOperator(f"b{i}", kind, "backward", seconds, (i,), ()))
    return Trace(tuple(operators), tuple(tensors), name="network")


def between(trace, share):
    """A budget: so much of the way from the smallest that anything fits in to all that is used."""
    floor = smallest_feasible_budget(trace, MACHINE)
    return int(floor + share * (max(live_bytes(trace)) - floor))


# ------------------------------------------------------------- published ones


@pytest.mark.sampled
@pytest.mark.parametrize("policy", SEARCHED)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
def test_every_policy_makes_a_plan_that_fits_or_says_that_it_cannot(policy, share):
    rng = np.random.default_rng(1)
    made = 0
    for _ in range(2):
        trace = network(rng, 12)
        budget = between(trace, share)
        try:
            plan = planner.plan(trace, MACHINE, budget, policy, time_limit=0.2)
        except BudgetError:
            continue
        made += 1
        found = simulate(trace, MACHINE, plan, budget)
        assert found.feasible
        assert found.step_s == pytest.approx(plan.predicted["step_s"])
        assert set(plan.decisions) == {t.saved for t in trace.tensors if t.saved >= 0}
        assert all(d.nbytes for d in plan.decisions.values())
    assert made or share < 1.0


def test_a_plan_says_when_swap_ins_start():
    # An engine does not know what memory later operators need: without, it fills all that there is.
    for seed in range(4):
        trace = network(np.random.default_rng(seed), 12)
        budget = between(trace, 0.5)
        plan = planner.plan(trace, MACHINE, budget, "tvdnn-heuristic")
        early = {p: replace(d, prefetch=None) for p, d in plan.decisions.items()}
        swaps = [d for d in plan.decisions.values() if d.action == "swap"]
        assert swaps
        assert all(d.prefetch is not None for d in swaps)
        found = simulate(trace, MACHINE, plan, budget)
        before = simulate(trace, MACHINE, replace(plan, decisions=early), budget)
        assert found.feasible
        assert found.step_s == pytest.approx(plan.predicted["step_s"])
        assert found.step_s <= 1.01 * before.step_s


def test_only_named_tensors_may_be_computed_again():
    trace = network(np.random.default_rng(3), 12)

    def may_be(recompute):
        simulator = Problem(trace, MACHINE, 1 << 30, recompute=recompute).simulator
        return {p for p, may in zip(simulator.saved, simulator.recomputable, strict=True) if may}

    every = may_be(True)
    assert len(every) > 2
    some = {min(every), max(every)}
    assert may_be(some) == some
    assert may_be({-5}) == may_be(set()) == may_be(False) == set()
    slow = replace(MACHINE, d2h_bytes_per_s=1e7, h2d_bytes_per_s=1e7)
    budget = between(trace, 0.9)
    plan = planner.plan(trace, slow, budget, "capuchin", recompute=every)
    free = {p for p, d in plan.decisions.items() if d.action == "recompute"}
    assert free
    plan = planner.plan(trace, slow, budget, "capuchin", recompute=every - free)
    assert free.isdisjoint(p for p, d in plan.decisions.items() if d.action == "recompute")


@pytest.mark.parametrize("policy", SEARCHED)
def test_the_same_seed_gives_the_same_plan(policy, monkeypatch):
    monkeypatch.setattr(home, "EVALUATIONS", 1000)  # some iterations, not all of the search
    trace = network(np.random.default_rng(2), 8)
    budget = max(live_bytes(trace))
    plans = [planner.plan(trace, MACHINE, budget, policy, seed=5) for _ in range(2)]
    assert plans[0] == plans[1]


def choices(n):
    return (np.array(choice, np.int8) for choice in itertools.product((0, 1), repeat=n))


def in_sections_s(trace, budget, choice):
    """Simulated seconds if the chosen tensors leave raw in small sections; None: over the budget.

    The program's flows are the limit of ever smaller sections.
    """
    cut = Decision("swap", "raw", section_bytes=MIB // 2)
    plan = Plan({p: cut for p, leaves in enumerate(choice) if leaves})
    found = simulate(trace, MACHINE, plan, budget)
    return found.step_s if found.feasible else None


@pytest.mark.parametrize(
    ("count", "most"), [(15, 4), pytest.param(60, 7, marks=[pytest.mark.slow])]
)
def test_the_ilp_finds_what_simulating_every_choice_finds(count, most):
    rng = np.random.default_rng(3)
    feasible = 0
    for _ in range(count):
        trace = network(rng, int(rng.integers(2, most + 1)))
        budget = int(max(live_bytes(trace)) * rng.uniform(0.3, 1.0))
        simulator = Simulator(trace, MACHINE, budget)
        found = Program(simulator).solve()
        tried = (in_sections_s(trace, budget, choice) for choice in choices(len(simulator.saved)))
        steps = [step_s for step_s in tried if step_s is not None]
        assert (found is None) == (not steps)
        if found is not None:
            feasible += 1
            assert found.proven
            assert simulator.compute_s + found.stall_s <= min(steps) * (1 + 1e-3)  # HiGHS's gap
            assert simulator.compute_s + found.stall_s >= min(steps) * 0.97
            chosen_s = in_sections_s(trace, budget, found.raw)
            assert chosen_s is not None
            assert chosen_s <= 1.03 * min(steps)
    assert count // 4 < feasible < count


def test_no_plan_of_raw_swaps_is_faster_than_the_relaxation():
    rng = np.random.default_rng(4)
    compared = 0
    for _ in range(20):
        trace = network(rng, 6)
        simulator = Simulator(trace, MACHINE, between(trace, float(rng.uniform(0.1, 0.9))))
        bound = least_stall(simulator, relaxed=True)
        assert bound is not None
        for action in choices(6):
            raw = np.zeros_like(action)
            result = simulator.run(action, raw, simulator.earliest_prefetch(action, raw))
            if result.feasible:
                compared += 1
                assert result.step_s >= (simulator.compute_s + bound.stall_s) * (1 - 1e-6)
    assert compared > 100


def test_the_ilps_plan_is_close_to_the_best_plan_of_raw_swaps():
    rng = np.random.default_rng(11)
    for _ in range(8):
        trace = network(rng, 7)
        budget = between(trace, float(rng.uniform(0.2, 0.8)))
        simulator = Simulator(trace, MACHINE, budget)
        best_s = np.inf
        for action in choices(7):
            raw = np.zeros_like(action)
            result = simulator.run(action, raw, simulator.earliest_prefetch(action, raw))
            best_s = min(best_s, penalised_s(result, simulator))
        made = planner.plan(trace, MACHINE, budget, "tvdnn-ilp")
        assert simulate(trace, MACHINE, made, budget).step_s <= 1.05 * best_s


@pytest.mark.parametrize("policy", ["tvdnn-heuristic", "tvdnn-ilp", "vdnn-all", "capuchin", "home"])
def test_no_policy_is_faster_than_its_bound(policy):
    rng = np.random.default_rng(12)
    compared = 0
    for _ in range(8):
        trace = network(rng, 10)
        budget = between(trace, 0.6)
        simulator = Simulator(trace, MACHINE, budget)
        bound = least_stall(simulator, relaxed=True)
        assert bound is not None
        try:
            made = planner.plan(trace, MACHINE, budget, policy, recompute=False, time_limit=0.1)
        except BudgetError:
            continue
        compared += 1
        step_s = simulate(trace, MACHINE, made, budget).step_s
        assert step_s >= (simulator.compute_s + bound.stall_s) * (1 - 1e-6)
    assert compared


@pytest.mark.parametrize("policy", ["tvdnn-ilp", "swapadvisor", "home", "joint"])
def test_of_equal_steps_the_one_that_moves_less_is_planned(policy):
    trace = network(np.random.default_rng(13), 10)
    free = Hardware("free", 1 << 40, {}, 1e12, 1e18, 1e18)  # whatever moves, the step is as long
    problem = Problem(trace, free, between(trace, 0.8), deadline=time.monotonic() + 1)
    plan = planner._solve(problem, policy)
    everything = np.ones(10, np.int8)
    moved = problem.simulator.to_plan(everything, np.zeros_like(everything))
    assert plan.predicted["step_s"] == pytest.approx(moved.predicted["step_s"])
    assert plan.predicted["link_bytes"] < 0.7 * moved.predicted["link_bytes"]


def test_a_flow_in_closed_form():
    # x0 and x1 of 100 MiB, saved by f0 and f1, each operator a second, a link of 200 MiB/s; w of
    # 150 MiB lives from f2 to b2. Budget 250 MiB: of 350 at f2 and b2, 100 have to be away.
    tensors = (
        TraceTensor(100 * MIB, saved=0),
        TraceTensor(100 * MIB, saved=1),
        TraceTensor(150 * MIB, saved=2),
    )
    operators = (
        TraceOperator("f0", "other", "forward", 1.0, (), (0,)),
        TraceOperator("f1", "other", "forward", 0.25, (), (1,)),
        TraceOperator("f2", "other", "forward", 1.0, (), (2,)),
        TraceOperator("b2", "other", "backward", 1.0, (2,), ()),
        TraceOperator("b1", "other", "backward", 1.0, (1,), ()),
        TraceOperator("b0", "other", "backward", 1.0, (0,), ()),
    )
    machine = Hardware("t", 1 << 40, {}, 1e12, 200.0 * MIB, 200.0 * MIB)
    flow = least_stall(Simulator(Trace(operators, tensors), machine, 250 * MIB))
    # x0 may leave from the end of f0 on: 50 MiB in f1, the rest in a stall of 0.25 s before f2.
    # It comes back in b1.
    assert flow is not None
    assert flow.raw.tolist() == [1, 0, 0]
    assert flow.stall_s == pytest.approx(0.25)
    again_s = np.array([np.inf, 0.125, np.inf])
    ways = Ways(np.full(3, MIB), np.full(3, np.inf), again_s)
    flow = least_stall(Simulator(Trace(operators, tensors), machine, 250 * MIB), ways)
    assert flow is not None  # computing x1 again takes 0.125 s, half of that stall
    assert flow.dropped.tolist() == [0, 1, 0]
    assert flow.stall_s == pytest.approx(0.0)
    codec_s = np.array([0.0625, np.inf, np.inf])
    ways = Ways(np.full(3, MIB), codec_s, again_s)
    flow = least_stall(Simulator(Trace(operators, tensors), machine, 250 * MIB), ways)
    assert flow is not None
    assert flow.encoded.tolist() == [1, 0, 0]


def test_vdnn_moves_the_inputs_of_its_layers():
    trace = network(np.random.default_rng(5), 10)
    kinds = [operator.kind for operator in trace.operators[:10]]
    assert inputs_of(trace, {"conv"}).tolist() == [kind == "conv" for kind in kinds]
    everything = planner.plan(trace, MACHINE, max(live_bytes(trace)), "vdnn-all")
    moved = {p for p, d in everything.decisions.items() if d.action == "swap"}
    assert moved == {i for i, kind in enumerate(kinds) if kind in ("conv", "pool")}
    assert all(d.codec == "raw" for d in everything.decisions.values() if d.action == "swap")


def test_vdnn_prefetches_no_further_than_the_next_convolution():
    kinds = ("conv", "linear", "linear", "conv", "linear")
    tensors = [TraceTensor(MIB, saved=i, role="activation") for i in range(5)] + [TraceTensor(8)]
    operators = [
        TraceOperator(f"f{i}", kind, "forward", 0.01, (i,), (i + 1,))
        for i, kind in enumerate(kinds)
    ]
    operators += [
        TraceOperator(f"b{i}", kinds[i], "backward", 0.01, (i,), ()) for i in reversed(range(5))
    ]
    simulator = Simulator(Trace(tuple(operators), tuple(tensors)), MACHINE)
    moved = np.array([True, False, False, True, False])
    points = prefetch_points(simulator, moved)
    # Backward is b4 b3 b2 b1 b0 at 5..9. X of f3 starts with b4. With b3 starts X of f0: no
    # convolution lies between. All others come on demand.
    assert points.tolist() == [6, 8, 7, 5, 5]
    assert simulator.backward.tolist() == [9, 8, 7, 6, 5]


def test_cswap_plus_compresses_what_is_sparse_and_not_hidden():
    rng = np.random.default_rng(6)
    trace = network(rng, 10, kinds=("conv",))
    slow = Hardware("slow", 1 << 40, {}, 1e12, 1e6, 1e6, codecs=MACHINE.codecs)
    plan = planner.plan(trace, slow, max(live_bytes(trace)), "cswap+")
    codecs = {p: d.codec for p, d in plan.decisions.items()}
    zeros = {t.saved: t.profile["zero_fraction"] for t in trace.tensors if t.saved >= 0}
    assert all(codecs[p] == "zvc" for p in codecs if zeros[p] > 0.2)
    fast = Hardware("fast", 1 << 40, {}, 1e12, 1e15, 1e15, codecs=MACHINE.codecs)
    plan = planner.plan(trace, fast, max(live_bytes(trace)), "cswap+")
    assert all(d.codec == "raw" for d in plan.decisions.values())


# ------------------------------------------------------------------- joint


def optimum(simulator):
    """The shortest feasible step of all actions and codecs, by simulation."""
    options = [(0, 0), *((1, c) for c in range(len(simulator.codecs))), (2, 0)]
    best = np.inf
    for choice in itertools.product(options, repeat=len(simulator.saved)):
        action = np.array([a for a, _ in choice], np.int8)
        codec = np.array([c for _, c in choice], np.int8)
        if (action[~simulator.recomputable] == 2).any():
            continue
        starts = simulator.earliest_prefetch(action, codec)
        best = min(best, penalised_s(simulator.run(action, codec, starts), simulator))
    return best


class Graph:
    """Layers with residual sums, masks and workspaces, of random sizes, times and ratios."""

    def __init__(self, rng, most_saved):
        self._rng, self._n_saved, self._most_saved = rng, 0, most_saved
        self._tensors: list[TraceTensor] = []
        n = int(rng.integers(3, 5))
        hidden, forward, extra = [self._tensor(self._size(), saved=True)], [], []
        for i in range(n):
            inputs, outputs = [hidden[-1]], [self._tensor(self._size(), saved=rng.random() < 0.8)]
            if len(hidden) > 1 and rng.random() < 0.4:
                inputs.append(hidden[int(rng.integers(len(hidden) - 1))])
            if rng.random() < 0.4:
                outputs.append(self._tensor(self._bytes(outputs[0]) // 8 + 1, saved=True))
            forward.append(self._operator(f"f{i}", "forward", 0.03, inputs, outputs))
            hidden.append(outputs[0])
            extra.append(outputs[1:])
        gradient = self._tensor(self._bytes(hidden[-1]))
        backward = [self._operator("loss", "forward", 0.002, [hidden[-1]], [gradient])]
        for i in reversed(range(n)):
            before = self._tensor(self._bytes(hidden[i]))
            inputs = [gradient, *extra[i], *([hidden[i]] if self._is_saved(hidden[i]) else [])]
            backward.append(self._operator(f"b{i}", "backward", 0.06, inputs, [before]))
            gradient = before
        self.trace = Trace((*forward, *backward), tuple(self._tensors), name="graph")

    def _size(self):
        return int(self._rng.integers(1, 64)) * MIB // 4

    def _bytes(self, tensor):
        return self._tensors[tensor].nbytes

    def _is_saved(self, tensor):
        return self._tensors[tensor].saved >= 0

    def _tensor(self, nbytes, *, saved=False):
        position = -1
        if saved and self._n_saved < self._most_saved:
            position, self._n_saved = self._n_saved, self._n_saved + 1
        ratios = {"zvc": float(self._rng.uniform(1, 4)), "int8": 3.9}
        self._tensors.append(TraceTensor(nbytes, saved=position, ratios=ratios))
        return len(self._tensors) - 1

    def _operator(self, name, phase, longest_s, inputs, outputs):
        seconds = float(self._rng.uniform(1e-3, longest_s))
        workspace = int(self._rng.integers(0, 16)) * MIB // 4 * int(self._rng.random() < 0.5)
        return TraceOperator(name, "conv", phase, seconds, tuple(inputs), tuple(outputs), workspace)


@pytest.mark.parametrize("machine", [MACHINE, SLOW_CODECS], ids=["taxed", "slow codecs"])
@pytest.mark.parametrize(
    ("count", "most_saved"), [(3, 5), pytest.param(100, 6, marks=[pytest.mark.slow])]
)
def test_joint_is_close_to_trying_everything(count, most_saved, machine):
    rng = np.random.default_rng(7)
    gaps = []
    for _ in range(count):
        trace = Graph(rng, most_saved).trace
        budget = between(trace, float(rng.uniform(0.1, 0.8)))
        problem = Problem(trace, machine, budget, deadline=time.monotonic() + 2.0)
        plan = planner._solve(problem, "joint")
        result = simulate(trace, machine, plan, budget)
        best = optimum(problem.simulator)
        if best >= problem.simulator.worst_s:
            continue  # nothing fits
        assert result.feasible
        gaps.append(result.step_s / best - 1)
    assert len(gaps) > 0.8 * count
    assert max(gaps) <= 0.02


def test_where_host_memory_is_the_devices_own_plans_do_without_raw_swaps():
    rng = np.random.default_rng(14)
    unified, made = replace(MACHINE, unified=True), 0
    for share in (0.3, 0.6, 0.9):
        trace = network(rng, 12)
        low, high = smallest_feasible_budget(trace, unified), max(live_bytes(trace))
        assert low > smallest_feasible_budget(trace, MACHINE)
        budget = int(low + share * (high - low))
        for policy in ("tvdnn-ilp", "home", "joint"):
            try:
                plan = planner.plan(trace, unified, budget, policy, time_limit=0.2, recompute=True)
            except BudgetError:
                assert policy == "tvdnn-ilp"  # it swaps raw only
                continue
            made += 1
            assert all(d.codec != "raw" for d in plan.decisions.values())
            assert simulate(trace, unified, plan, budget).feasible
    assert made == 6


@pytest.mark.parametrize(
    ("operators", "scale", "share", "time_limit"),
    [
        (10, 16, 0.5, 0.5),
        *(
            pytest.param(20, scale, share, 1.0, marks=pytest.mark.slow)
            for scale in (1, 16)
            for share in (0.2, 0.5, 0.8)
        ),
    ],
)
def test_joint_is_no_worse_than_any_other(operators, scale, share, time_limit):
    """With the larger tensors, tvdnn-ilp plans sections."""
    trace = network(np.random.default_rng(8), operators)
    tensors = tuple(replace(t, nbytes=scale * t.nbytes) for t in trace.tensors)
    trace = replace(trace, tensors=tensors)
    budget = between(trace, share)
    others = [name for name in SEARCHED if name != "joint"]
    rows = planner.compare(trace, MACHINE, budget, [*others, "joint"], time_limit=time_limit)
    steps = {row.policy: row.simulation.step_s for row in rows if row.simulation is not None}
    assert steps["joint"] <= min(steps.values()) * (1 + 1e-9), steps


@pytest.mark.parametrize("policy", ["joint", "home"])
def test_a_deadline_is_kept_and_the_best_so_far_returned(policy):
    trace = network(np.random.default_rng(9), 200)
    began = time.monotonic()
    plan = planner.plan(trace, MACHINE, between(trace, 0.9), policy, time_limit=0.5)
    assert time.monotonic() - began < 3.0
    assert plan.decisions


@pytest.mark.skipif(
    threading.current_thread() is not threading.main_thread(), reason="signals need it"
)
@pytest.mark.parametrize("policy", ["joint", "home"])
def test_ctrl_c_returns_the_best_so_far(policy):
    trace = network(np.random.default_rng(10), 300)
    threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
    began = time.monotonic()
    plan = planner.plan(trace, MACHINE, max(live_bytes(trace)) * 2, policy, time_limit=30)
    assert time.monotonic() - began < 10
    assert plan.predicted["feasible"]
