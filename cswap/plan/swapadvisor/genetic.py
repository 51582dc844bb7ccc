"""SwapAdvisor's genetic search over schedule and memory allocation.

Source: SwapAdvisor (ASPLOS 2020), section 5. A crossover makes four children: two schedules times
two allocations. Survivors are drawn from the softmax over ``(T_best - t) / T_best``, without a
temperature. The best chromosome always survives; this is our choice, the paper does not define it.
The sample size is the paper's. The paper does not give the number of generations; here the time
limit or the number of evaluations ends the search.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.swapadvisor import pools as memory
from cswap.plan.swapadvisor import schedules
from cswap.plan.swapadvisor.swaps import Swaps, swaps_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from cswap.plan.swapadvisor.demand import Demand
    from cswap.plan.swapadvisor.graph import Graph
    from cswap.plan.swapadvisor.pools import Pools

SAMPLES: Final = 144
CHANCE: Final = 0.1
"""Probability of a mutation; the paper says "about 10 %"."""

EVALUATIONS: Final = 20_000

COARSENESS: Final = (1.0, 1.1, 1.25, 1.5, 2.0, 4.0)
"""Factors for the first allocations: sizes within such a factor share a class."""


@dataclass(frozen=True, slots=True)
class Individual:
    """One chromosome with its cost.

    Attributes:
        order: SCH, the schedule.
        pools: CLS and CNT, the allocation.
        swaps: the planned and timed swaps.
        over_bytes: bytes beyond the capacity or the pools; 0 if feasible.
        cost_s: step time, plus a penalty if infeasible.
    """

    order: NDArray[np.int64]
    pools: Pools
    swaps: Swaps
    over_bytes: int
    cost_s: float


class Search:
    """A population of chromosomes.

    Attributes:
        people: survivors of the last generation, best first.
        evaluations: number of chromosomes evaluated so far.
    """

    def __init__(self, graph: Graph, demand: Demand, capacity: int, seed: int) -> None:
        """Prepare a search from the trace's own order and classes of several widths."""
        self._graph, self._demand, self._capacity = graph, demand, capacity
        self._rng = np.random.default_rng(seed)
        self._worst_s = float(graph.seconds.sum() + graph.d2h_s.sum() + graph.h2d_s.sum())
        self.evaluations = 0
        self.people: list[Individual] = []

    def run(self, stopped: Callable[[], bool], evaluations: int | None = None) -> None:
        """Run generations until ``stopped()`` or the limit of evaluations is reached."""
        limit = EVALUATIONS if evaluations is None else evaluations
        self.people = list(self._first(stopped))
        while not stopped() and self.evaluations < limit and len(self.people) > 1:
            self.people = self._survivors([*self.people, *self._children(stopped)])
        self.people.sort(key=lambda one: one.cost_s)

    def _first(self, stopped: Callable[[], bool]) -> Iterator[Individual]:
        own = np.arange(len(self._graph.seconds))
        starts = [self._demand.pools(factor, self._capacity) for factor in COARSENESS]
        for i in range(SAMPLES):
            pools, order = starts[i % len(starts)], own
            if i >= len(starts):
                if stopped():
                    return
                pools = memory.mutated(pools, CHANCE, self._rng)
                if i % 2:
                    order = schedules.mutated(self._graph, own, CHANCE, self._rng)
            yield self._judged(order, pools)

    def _judged(self, order: NDArray[np.int64], pools: Pools) -> Individual:
        least = self._demand.least(pools.cls)
        fitting = memory.repaired_counts(self._graph.sizes, pools, self._capacity, least)
        swaps = swaps_of(self._graph, order, fitting)
        each = memory.object_bytes(self._graph.sizes, fitting.cls)
        over = swaps.overflow_bytes + max(int(fitting.cnt @ each) - self._capacity, 0)
        penalty_s = self._worst_s * (1 + over / self._capacity) if over else 0.0
        self.evaluations += 1
        return Individual(order, fitting, swaps, over, swaps.step_s + penalty_s)

    def _children(self, stopped: Callable[[], bool]) -> Iterator[Individual]:
        drawn = self._rng.permutation(len(self.people))
        for mother, father in zip(drawn[::2], drawn[1::2], strict=False):
            if stopped():
                return
            yield from self._of(self.people[mother], self.people[father])

    def _of(self, mother: Individual, father: Individual) -> Iterator[Individual]:
        rng = self._rng
        cut, split = rng.integers(1, len(mother.order)), rng.integers(1, len(mother.pools.cls) + 1)
        orders, allocations = [], []
        for one, other in ((mother, father), (father, mother)):
            order = schedules.crossed(one.order, other.order, int(cut))
            if rng.random() < CHANCE:
                order = schedules.mutated(self._graph, order, CHANCE, rng)
            pools = memory.crossed(one.pools, other.pools, int(split))
            if rng.random() < CHANCE:
                pools = memory.mutated(pools, CHANCE, rng)
            orders.append(order)
            allocations.append(pools)
        for order in orders:
            for pools in allocations:
                yield self._judged(order, pools)

    def _survivors(self, people: list[Individual]) -> list[Individual]:
        people.sort(key=lambda one: one.cost_s)
        cost_s = np.array([one.cost_s for one in people[1:]])
        odds = np.exp((people[0].cost_s - cost_s) / people[0].cost_s)
        count = min(SAMPLES - 1, int(np.count_nonzero(odds)))
        drawn = self._rng.choice(len(odds), count, replace=False, p=odds / odds.sum())
        return [people[0], *(people[1 + i] for i in sorted(drawn))]
