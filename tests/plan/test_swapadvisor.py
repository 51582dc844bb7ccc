"""SwapAdvisor: the paper's worked example, its genetic operators, its planner and the policy."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch

import cswap
from cswap.errors import ConfigError
from cswap.plan.hardware import Hardware
from cswap.plan.planner import plan
from cswap.plan.policies import swapadvisor
from cswap.plan.policy_tools.problem import Problem
from cswap.plan.simulate import simulate, smallest_feasible_budget
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.plan.simulator.reorder import reordered
from cswap.plan.swapadvisor import genetic, schedules
from cswap.plan.swapadvisor import pools as memory
from cswap.plan.swapadvisor.demand import Demand
from cswap.plan.swapadvisor.genetic import Search
from cswap.plan.swapadvisor.graph import graph_of
from cswap.plan.swapadvisor.pools import Pools
from cswap.plan.swapadvisor.swaps import swaps_of
from cswap.schema.plan import Decision, Plan
from cswap.schema.trace import Trace, TraceOperator, TraceTensor

MACHINE = Hardware("test", 1 << 40, {}, 1e12, 100.0, 100.0, duplex_factor=1.0, link_latency_s=0.0)


def ints(*values):
    return np.array(values, np.int64)


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


# ---------------------------------------------------------------- allocations


def test_the_example_of_the_paper():
    sizes = ints(1, 2, 3, 4)
    one, other = Pools(ints(0, 0, 0, 0), ints(4)), Pools(ints(0, 1, 1, 1), ints(8, 1))
    child = memory.crossed(other, one, 2)
    assert child.cls.tolist() == [0, 1, 1, 1]  # [1, 2, 1, 1], repaired to [1, 2, 2, 2]
    assert child.cnt.tolist() == [8, 3]  # of [8, 1, 4, 4]
    assert memory.object_bytes(sizes, child.cls).tolist() == [1, 4]
    fitting = memory.repaired_counts(sizes, child, 12, ints(1, 1))
    assert fitting.cnt.tolist() == [4, 2]


def test_allocations_stay_valid_through_crossovers_mutations_and_repairs():
    rng = np.random.default_rng(0)
    for _ in range(300):
        sizes = np.sort(rng.choice(1000, int(rng.integers(1, 12)), replace=False)) + 1
        parents = []
        for _ in range(2):
            cls = np.cumsum(rng.integers(0, 2, len(sizes)))
            cls -= cls[0]
            parents.append(Pools(cls, rng.integers(1, 9, cls[-1] + 1)))
        child = memory.crossed(parents[0], parents[1], int(rng.integers(1, len(sizes) + 1)))
        child = memory.mutated(child, 0.3, rng)
        steps = np.diff(child.cls, prepend=0)
        assert child.cls[0] == 0
        assert set(steps.tolist()) <= {0, 1}
        assert len(child.cnt) == child.cls[-1] + 1
        each = memory.object_bytes(sizes, child.cls)
        assert (each[child.cls] >= sizes).all()
        least = np.ones_like(child.cnt)
        capacity = int(least @ each) + int(rng.integers(0, 5000))
        fitting = memory.repaired_counts(sizes, child, capacity, least)
        assert int(fitting.cnt @ each) <= capacity
        assert (fitting.cnt <= child.cnt).all()
        assert (fitting.cnt >= least).all()


def test_what_cannot_be_done_without_stays_over_capacity():
    pools = memory.repaired_counts(ints(10), Pools(ints(0), ints(9)), 20, ints(5))
    assert pools.cnt.tolist() == [5]


# ------------------------------------------------------------------ schedules


def diamond():
    """Two branches that may run in any order, then a join, then an update in place."""
    tensors = tuple(TraceTensor(8) for _ in range(4))
    operators = (
        TraceOperator("source", "other", "forward", 1.0, (), (0,)),
        TraceOperator("left", "other", "forward", 1.0, (0,), (1,)),
        TraceOperator("right", "other", "forward", 1.0, (0,), (2,)),
        TraceOperator("write", "other", "forward", 1.0, (1,), ()),
        TraceOperator("join", "other", "backward", 1.0, (1, 2), (3,)),
    )
    return Trace(operators, tensors)


def test_schedules_stay_topological():
    trace = diamond()
    graph = graph_of(trace, MACHINE)
    rng = np.random.default_rng(0)
    orders = [np.arange(5)]
    seen = set()
    for _ in range(100):
        one, other = (orders[int(rng.integers(len(orders)))] for _ in range(2))
        crossed = schedules.crossed(one, other, int(rng.integers(1, 5)))
        orders.append(schedules.mutated(graph, crossed, 0.5, rng))
        rank = np.argsort(orders[-1])
        for k, later in enumerate(graph.after):
            assert all(rank[k] < rank[after] for after in later)
        seen.add(tuple(orders[-1].tolist()))
    # "write" changes what "join" reads, and so must stay between "left" and "join"
    assert seen == {(0, 1, 2, 3, 4), (0, 2, 1, 3, 4), (0, 1, 3, 2, 4)}
    assert schedules.mutated(graph, np.arange(5), 0.0, rng).tolist() == [0, 1, 2, 3, 4]


def test_an_order_must_be_a_permutation():
    with pytest.raises(ConfigError, match=r"plan\.order: must name each"):
        reordered(diamond(), [0, 1, 2, 3, 3])


# -------------------------------------------------------------------- planner


def swaps(trace, count):
    graph = graph_of(trace, MACHINE)
    classes = Pools(np.zeros(len(graph.sizes), np.int64), ints(count))
    return swaps_of(graph, np.arange(len(trace.operators)), classes)


def test_with_room_for_everything_nothing_moves():
    found = swaps(chain(4), 4)
    assert found.step_s == 8.0
    assert found.overflow_bytes == found.copied_bytes == 0
    assert not found.left.any()


def test_the_tensor_used_furthest_in_the_future_goes_and_comes_back_in_time():
    # Three objects for four tensors. f2 makes x3: of x0, x1 (x2 is being read) x0 is needed last.
    # x0 left at 1 s (end of f0), is out at 2 s; f2 starts at 2 s without waiting. Back: x3 dies at
    # 5 s (end of b3), so x0 comes at 5-6 s, is needed by b0 at 7 s.
    found = swaps(chain(4), 3)
    assert found.left.tolist() == [True, False, False, False]
    assert found.copied_bytes == 200
    assert found.step_s == 8.0
    # With a link of a quarter of the rate: out at 5 s, f2 waits until then and ends at 6 s, f3, b3
    # at 8 s; in from 8 to 12 s; b2, b1 end at 10 s, b0 waits until 12 s.
    slow = replace(MACHINE, d2h_bytes_per_s=25.0, h2d_bytes_per_s=25.0)
    graph = graph_of(chain(4), slow)
    found = swaps_of(graph, np.arange(8), Pools(ints(0), ints(3)))
    assert found.step_s == 13.0


def test_pools_beyond_the_capacity_are_no_solution():
    # No step runs without two objects of 100 bytes: nothing overflows them, but they do not fit.
    graph = graph_of(chain(4), MACHINE)
    search = Search(graph, Demand.of(chain(4), graph), 150, seed=0)
    found = search._judged(np.arange(8), Pools(ints(0), ints(1)))
    assert found.pools.cnt.tolist() == [2]
    assert (found.swaps.overflow_bytes, found.over_bytes) == (0, 50)
    assert found.cost_s > found.swaps.step_s


def test_too_few_objects_are_an_overflow():
    found = swaps(chain(4), 1)
    assert found.overflow_bytes > 0


def test_a_tensor_leaves_only_from_its_own_class():
    tensors = (TraceTensor(100, saved=0), TraceTensor(50, saved=1), TraceTensor(50))
    operators = (
        TraceOperator("f0", "other", "forward", 1.0, (), (0,)),
        TraceOperator("f1", "other", "forward", 1.0, (), (1,)),
        TraceOperator("f2", "other", "forward", 1.0, (), (2,)),
        TraceOperator("b2", "other", "backward", 1.0, (2,), ()),
        TraceOperator("b1", "other", "backward", 1.0, (1,), ()),
        TraceOperator("b0", "other", "backward", 1.0, (0,), ()),
    )
    graph = graph_of(Trace(operators, tensors), MACHINE)
    found = swaps_of(graph, np.arange(6), Pools(ints(0, 1), ints(1, 1)))
    assert found.left.tolist() == [False, True, False]


# --------------------------------------------------------------------- search


def test_a_search_ends_no_worse_than_it_began_and_repeats_with_its_seed():
    trace = chain(12, np.random.default_rng(1))
    graph = graph_of(trace, MACHINE)
    demand = Demand.of(trace, graph)
    capacity = int(0.6 * max(live_bytes(trace)))

    def search(evaluations):
        made = Search(graph, demand, capacity, 3)
        made.run(lambda: False, evaluations)
        return made.people

    first, last, again = search(1), search(1000), search(1000)
    assert last[0].cost_s <= first[0].cost_s
    assert [one.cost_s for one in last] == [one.cost_s for one in again]
    for one in last:
        each = memory.object_bytes(graph.sizes, one.pools.cls)
        assert int(one.pools.cnt @ each) <= capacity or one.cost_s > last[0].cost_s


# --------------------------------------------------------------------- policy


def test_the_plan_is_feasible_and_not_worse_than_moving_everything():
    trace = chain(10, np.random.default_rng(2))
    floor = smallest_feasible_budget(trace, MACHINE)
    budget = (floor + max(live_bytes(trace))) // 2
    made = plan(trace, MACHINE, budget, "swapadvisor", time_limit=0.5)
    found = simulate(trace, MACHINE, made, budget)
    assert found.feasible
    everything = Plan({p: Decision("swap") for p in made.decisions})
    assert found.step_s <= simulate(trace, MACHINE, everything, budget).step_s * 1.001


def wide():
    """Forward branches whose outputs only the join reads: the order decides how many live."""
    n = 4
    tensors, operators = [], []
    for i in range(n):  # a large one that only shrinks to a small one
        tensors += [TraceTensor(1000), TraceTensor(10, saved=i)]
    tensors += [TraceTensor(10)]
    operators += [
        TraceOperator(f"grow{i}", "other", "forward", 1.0, (), (2 * i,)) for i in range(n)
    ]
    operators += [
        TraceOperator(f"shrink{i}", "other", "forward", 1.0, (2 * i,), (2 * i + 1,))
        for i in range(n)
    ]
    small = tuple(2 * i + 1 for i in range(n))
    operators.append(TraceOperator("join", "other", "forward", 1.0, small, (2 * n,)))
    operators.append(TraceOperator("back", "other", "backward", 1.0, (*small, 2 * n), ()))
    return Trace(tuple(operators), tuple(tensors))


def test_an_order_that_helps_is_part_of_the_plan(monkeypatch):
    trace = wide()
    problem = Problem(trace, MACHINE, 3100)  # the trace's own order needs 4,000
    monkeypatch.setattr(genetic, "EVALUATIONS", 2000)
    made = swapadvisor.solve(problem)
    assert sorted(made.order) == list(range(len(trace.operators)))
    found = simulate(trace, MACHINE, made, 3100)
    assert found.feasible
    assert Plan.parse(made.to_dict()) == made
    without = simulate(trace, MACHINE, replace(made, order=()), 3100)
    assert not without.feasible


def test_an_engine_refuses_an_order_that_is_not_the_models_own():
    made = Plan({}, order=(1, 0))
    with pytest.raises(ConfigError, match="an order of operators that is not the model's own"):
        cswap.install(torch.nn.Linear(4, 4), plan=made)


@pytest.mark.parametrize("order", ["first", [0.5], [True]])
def test_a_plan_with_a_wrong_order_names_the_field(order):
    with pytest.raises(ConfigError, match=r"plan\.order"):
        Plan.parse({"version": 3, "decisions": {}, "order": order})
