"""SwapAdvisor's swap planner and its simulator in one pass over the schedule.

Source: SwapAdvisor (ASPLOS 2020), section 4. The pass scans the operators in order. Each tensor
that an operator reads or makes takes an object of its size class. If no object is free, a tensor of
that class is swapped out: the one whose next use is furthest in the future (Belady). Tensors whose
last use is at least a threshold ago go before all others.

There are three streams. An operator waits for the swap-ins of its inputs. A swap-in waits for the
swap-out whose object it takes. A swap-out waits for the last operator that used its tensor.

The paper moves any tensor at any time, parameters included. Here only saved tensors move, once
each, since an engine can do no more.

The paper gives no threshold; ours is the duration of the swap-out. Among the free objects of a
class, the one that has been free the longest is taken, so that swap-ins start early. If no tensor
may leave, the pool grows, and these bytes count as overflow.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from cswap.plan.swapadvisor.pools import object_bytes
from cswap.plan.swapadvisor.scan import State, Tables, scan

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.swapadvisor.graph import Graph
    from cswap.plan.swapadvisor.pools import Pools


class Swaps(NamedTuple):
    """The swaps of one chromosome, and their cost.

    Attributes:
        step_s: end of the last operator and of the last copy.
        overflow_bytes: bytes taken beyond the pools; 0 if the chromosome is feasible.
        left: [t] whether a tensor was swapped out.
        copied_bytes: bytes copied in both directions together.
    """

    step_s: float
    overflow_bytes: int
    left: NDArray[np.bool_]
    copied_bytes: int


def swaps_of(graph: Graph, order: NDArray[np.int64], pools: Pools) -> Swaps:
    """Plan and time the swaps of a schedule in these pools."""
    tables = _tables(graph, pools)
    state = _state(tables)
    scan(tables, state, order)
    overflow, copied = state.totals.tolist()
    return Swaps(float(state.clock.max()), overflow, state.left, copied)


def _tables(graph: Graph, pools: Pools) -> Tables:
    return Tables(
        *(graph.seconds, *graph.inputs, *graph.outputs, graph.nbytes, graph.n_uses),
        *(graph.n_forward, graph.leaves, graph.d2h_s, graph.h2d_s, pools.cls[graph.size_of]),
        np.concatenate([[0], np.cumsum(pools.cnt)]).astype(np.int64),
        object_bytes(graph.sizes, pools.cls),
    )


def _state(tables: Tables) -> State:
    n, classes, objects = len(tables.nbytes), len(tables.object_bytes), int(tables.first[-1])
    return State(
        where=np.zeros(n, np.int8),
        place=np.full(n, -1, np.int64),
        touched=np.zeros(n, np.int64),
        read=np.zeros(n, np.int64),
        end_s=np.zeros(n),
        host_s=np.zeros(n),
        user=np.full(n, -1, np.int64),
        left=np.zeros(n, np.bool_),
        held=np.full(objects, -1, np.int64),
        free_s=np.zeros(objects),
        queue=np.arange(objects, dtype=np.int64),
        head=np.zeros(classes, np.int64),
        n_free=np.diff(tables.first),
        clock=np.zeros(3),
        totals=np.zeros(2, np.int64),
    )
