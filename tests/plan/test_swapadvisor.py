"""SwapAdvisor's swaps: which tensors leave for an operator's memory, and the plan made of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from cswap.plan.hardware import Hardware
from cswap.plan.planner import plan
from cswap.plan.policies.swapadvisor import moved
from cswap.plan.simulate import Simulator, simulate, smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.schema.plan import Decision, Plan
from cswap.schema.trace import Trace, TraceOperator, TraceTensor

MACHINE = Hardware("test", 1 << 40, {}, 1e12, 100.0, 100.0)


def chain(n, rng=None):
    """Layers f0..fn-1 that save their inputs, then b(n-1)..b0; 1 second and 100 bytes each."""
    size = (lambda: 100) if rng is None else (lambda: int(rng.choice([40, 50, 100])))
    tensors = [TraceTensor(size(), saved=i, role="activation" if i else "input") for i in range(n)]
    operators = [
        TraceOperator(f"f{i}", "other", "forward", 1.0, (i,), (i + 1,) if i + 1 < n else ())
        for i in range(n)
    ]
    operators += [
        TraceOperator(f"b{i}", "other", "backward", 1.0, (i,), ()) for i in reversed(range(n))
    ]
    return Trace(tuple(operators), tuple(tensors), name="chain")


@pytest.mark.parametrize(
    ("capacity", "leaving"),
    [
        (400, []),
        (399, [0]),  # f2 makes x3: of x0 and x1 (x2 is being read), x0 is needed last
        (299, [0, 1]),  # f1 makes x2 while x1 is being read, so x0 leaves, and x1 at f2
        (100, [0, 1, 2]),  # b3 reads x3 right after f3: it has no time to leave
    ],
)
def test_the_tensor_used_furthest_in_the_future_leaves(capacity, leaving):
    action = moved(Simulator(chain(4), MACHINE), capacity)
    assert np.flatnonzero(action).tolist() == leaving


def test_a_tensor_that_has_rested_for_a_swap_out_leaves_before_others():
    # At f3 x0 rests since 1 s, x1 since 2 s. x0 is needed later, but its swap-out takes 4 s.
    trace = chain(5)
    assert np.flatnonzero(moved(Simulator(trace, MACHINE), 499)).tolist() == [0]
    large = replace(trace.tensors[0], nbytes=400)
    trace = replace(trace, tensors=(large, *trace.tensors[1:]))
    assert np.flatnonzero(moved(Simulator(trace, MACHINE), 799)).tolist() == [1]


@pytest.mark.parametrize("seed", range(4))
def test_the_plan_is_feasible_and_not_worse_than_moving_everything(seed):
    trace = chain(10, np.random.default_rng(seed))
    floor = smallest_feasible_budget(trace, MACHINE)
    budget = (floor + max(live_bytes(trace))) // 2
    made = plan(trace, MACHINE, budget, "swapadvisor")
    found = simulate(trace, MACHINE, made, budget)
    assert found.feasible
    everything = Plan({p: Decision("swap") for p in made.decisions})
    assert found.step_s <= simulate(trace, MACHINE, everything, budget).step_s * 1.001
