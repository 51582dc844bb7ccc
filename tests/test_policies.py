"""The policies: against exhaustive search, against each other, and when they must stop early."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time

import numpy as np
import pytest

from cswap.errors import BudgetError
from cswap.plan import planner
from cswap.plan.hardware import CodecRate, Hardware
from cswap.plan.lifetimes import live_bytes
from cswap.plan.policies import tvdnn_ilp
from cswap.plan.problem import Problem
from cswap.plan.residency import Residency
from cswap.plan.search import penalised_s
from cswap.plan.simulate import Simulator, simulate, smallest_feasible_budget
from cswap.plan.vdnn import inputs_of, prefetch_points
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
    codecs={"zvc": CodecRate(1e10, 1e10), "int8": CodecRate(5e9, 5e9)},
)
SEARCHED = [name for name in planner.available() if name not in ("none", "oracle")]


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


@pytest.mark.parametrize("policy", SEARCHED)
@pytest.mark.parametrize("share", [1.0, 0.6, 0.3])
def test_every_policy_makes_a_plan_that_fits_or_says_that_it_cannot(policy, share):
    rng = np.random.default_rng(1)
    made = 0
    for _ in range(4):
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


@pytest.mark.parametrize("policy", SEARCHED)
def test_the_same_seed_gives_the_same_plan(policy):
    trace = network(np.random.default_rng(2), 8)
    budget = max(live_bytes(trace))
    plans = [planner.plan(trace, MACHINE, budget, policy, seed=5) for _ in range(2)]
    assert plans[0] == plans[1]


def exhaustive(residency):
    best = None
    for choice in itertools.product((0, 1), repeat=len(residency.nbytes)):
        action = np.array(choice, np.int8)
        if (residency.over(action) <= 0).all():
            nbytes = int(residency.nbytes @ action)
            best = nbytes if best is None else min(best, nbytes)
    return best


def test_the_ilp_finds_what_trying_everything_finds():
    rng = np.random.default_rng(3)
    feasible = 0
    for _ in range(200):
        trace = network(rng, int(rng.integers(2, 11)))
        budget = int(max(live_bytes(trace)) * rng.uniform(0.3, 1.0))
        residency = Residency.of(Simulator(trace, MACHINE, budget))
        chosen, best = tvdnn_ilp.least_bytes(residency), exhaustive(residency)
        if best is None:
            assert chosen is None
            continue
        feasible += 1
        assert chosen is not None
        assert (residency.over(chosen) <= 0).all()
        assert int(residency.nbytes @ chosen) == best
    assert 100 < feasible < 200


def test_no_heuristic_moves_less_than_the_ilps_bound():
    rng = np.random.default_rng(4)
    compared = 0
    for _ in range(40):
        trace = network(rng, 10)
        problem = Problem(trace, MACHINE, between(trace, 0.6))
        residency = Residency.of(problem.simulator)
        bound = tvdnn_ilp.least_bytes(residency)
        plan = planner._solve(problem, "tvdnn-heuristic")
        action, _, _ = problem.simulator.from_plan(plan)
        if bound is None or (residency.over(action) > 0).any():
            continue
        compared += 1
        assert residency.nbytes @ action >= residency.nbytes @ bound
    assert compared > 10


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


def test_joint_is_close_to_trying_everything():
    rng = np.random.default_rng(7)
    gaps = []
    for _ in range(50):
        trace = network(rng, 4)
        budget = between(trace, float(rng.uniform(0.1, 0.8)))
        problem = Problem(trace, MACHINE, budget, deadline=time.monotonic() + 0.3)
        plan = planner._solve(problem, "joint")
        result = simulate(trace, MACHINE, plan, budget)
        best = optimum(problem.simulator)
        if best >= problem.simulator.worst_s:
            continue  # nothing fits
        assert result.feasible
        gaps.append(result.step_s / best - 1)
    assert len(gaps) > 30
    assert max(gaps) <= 0.02


def test_joint_is_no_worse_than_any_other():
    rng = np.random.default_rng(8)
    for share in (0.2, 0.5, 0.8):
        trace = network(rng, 20)
        budget = between(trace, share)
        others = [name for name in SEARCHED if name != "joint"]
        rows = planner.compare(trace, MACHINE, budget, [*others, "joint"], time_limit=1.0)
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
