"""The schedule half of a chromosome: SCH, a topological order of the operators.

Source: SwapAdvisor (ASPLOS 2020), section 5.2.
"""

from __future__ import annotations

from heapq import heappop, heappush
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.swapadvisor.graph import Graph

    Order = NDArray[np.int64]


def crossed(one: Order, other: Order, point: int) -> Order:
    """The first ``point`` operators of ``one``, then the rest in the order of ``other``.

    The result is a topological order if both parents are.

    >>> crossed(np.array([0, 2, 1, 3]), np.array([0, 1, 2, 3]), 2).tolist()
    [0, 2, 1, 3]
    """
    taken = np.zeros(len(one), np.bool_)
    taken[one[:point]] = True
    return np.concatenate([one[:point], other[~taken[other]]])


def mutated(graph: Graph, order: Order, chance: float, rng: np.random.Generator) -> Order:
    """Rebuild an order from the ready operators: the earliest, or with ``chance`` a random one."""
    rank = np.empty(len(order), np.int64)
    rank[order] = np.arange(len(order))
    waiting = graph.n_before.copy()
    heap = [(int(rank[k]), int(k)) for k in np.flatnonzero(waiting == 0)]
    heap.sort()
    drawn = rng.random(len(order)) < chance
    out: list[int] = []
    while heap:
        if drawn[len(out)] and len(heap) > 1:
            place = int(rng.integers(len(heap)))
            heap[0], heap[place] = (-1, heap[place][1]), heap[0]
            heap = sorted(heap)
        k = heappop(heap)[1]
        out.append(k)
        for after in graph.after[k]:
            waiting[after] -= 1
            if waiting[after] == 0:
                heappush(heap, (int(rank[after]), after))
    return np.array(out, np.int64)
