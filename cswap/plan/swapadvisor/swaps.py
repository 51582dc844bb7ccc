"""SwapAdvisor's swap planner and its simulator in one pass over the schedule.

Source: SwapAdvisor (ASPLOS 2020), section 4. Operators are scanned in order. What one reads or
makes takes an object of its size class; if none is free, among the tensors of that class the one
used furthest in the future goes (Belady), of those whose last use lies a threshold back if there
are any. Three streams: an operator waits for the swap-ins of what it reads, a swap-in for the
swap-out whose object it takes, a swap-out for the last operator that used its tensor. What is on
the host unchanged goes without a copy.

The paper gives no threshold; ours is the time that the swap-out takes. Of a class's free objects
the one that has been free the longest is taken, so that swap-ins start early. Where nothing may go
the pool grows, and what that takes counts as overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cswap.plan.swapadvisor.pools import object_bytes
from cswap.plan.swapadvisor.scan import CLEAN, DIRTY, State, Tables, scan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.swapadvisor.graph import Graph
    from cswap.plan.swapadvisor.pools import Pools


class Swaps(NamedTuple):
    """What one chromosome comes to.

    Attributes:
        step_s: end of the last operator and of the last copy.
        overflow_bytes: taken beyond the pools; 0 if the chromosome is feasible.
        left: [t] whether a tensor was swapped out.
        copied_bytes: over the link, both directions together.
    """

    step_s: float
    overflow_bytes: int
    left: NDArray[np.bool_]
    copied_bytes: int


def swaps_of(graph: Graph, order: NDArray[np.int64], pools: Pools) -> Swaps:
    """Plan and time the swaps of a schedule in these pools.

    Two passes: parameters that are resident when the first one ends are so when the second starts,
    so that the plan repeats in every step.
    """
    tables, initial = _tables(graph, pools), np.zeros(len(graph.nbytes), np.bool_)
    if graph.parameter.any():
        state = _state(tables, initial)
        scan(tables, state, order)
        on_device = (state.where == DIRTY) | (state.where == CLEAN)
        initial = graph.parameter & on_device
    state = _state(tables, initial)
    scan(tables, state, order)
    overflow, copied = state.totals.tolist()
    return Swaps(float(state.clock.max()), overflow, state.left, copied)


def _tables(graph: Graph, pools: Pools) -> Tables:
    return Tables(
        *(graph.seconds, *graph.inputs, *graph.outputs, graph.nbytes, graph.n_uses),
        *(graph.n_forward, graph.leave, graph.parameter, graph.updates),
        *(graph.d2h_s, graph.h2d_s, pools.cls[graph.size_of]),
        np.concatenate([[0], np.cumsum(pools.cnt)]).astype(np.int64),
        object_bytes(graph.sizes, pools.cls),
    )


def _state(tables: Tables, initial: NDArray[np.bool_]) -> State:
    n, classes, objects = len(tables.nbytes), len(tables.object_bytes), int(tables.first[-1])
    return State(
        where=np.zeros(n, np.int8),
        place=np.full(n, -1, np.int64),
        touched=np.zeros(n, np.int64),
        read=np.zeros(n, np.int64),
        end_s=np.zeros(n),
        host_s=np.zeros(n),
        user=np.full(n, -1, np.int64),
        initial=initial.copy(),
        left=np.zeros(n, np.bool_),
        held=np.full(objects, -1, np.int64),
        free_s=np.zeros(objects),
        queue=np.arange(objects, dtype=np.int64),
        head=np.zeros(classes, np.int64),
        n_free=np.diff(tables.first),
        clock=np.zeros(3),
        totals=np.zeros(2, np.int64),
    )
