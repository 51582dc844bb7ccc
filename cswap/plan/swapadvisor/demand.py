"""Numbers of objects of each size that a step holds, and that it needs at least."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulator.lifetimes import lifetimes
from cswap.plan.swapadvisor.pools import Pools, object_bytes, repaired_counts

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.swapadvisor.graph import Graph
    from cswap.schema.trace import Trace

    Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Demand:
    """Tensors by operator and size, in the trace's own order.

    Attributes:
        sizes: TS, bytes.
        live: [m, sizes] number of tensors that live while an operator runs.
        bound: [m, sizes] number of these that must be on the device.
    """

    sizes: Ints
    live: Ints
    bound: Ints

    @staticmethod
    def of(trace: Trace, graph: Graph) -> Demand:
        """Count the tensors of a trace."""
        life, m = lifetimes(trace), len(trace.operators)
        live = np.zeros((m + 1, len(graph.sizes)), np.int64)
        away = np.zeros_like(live)
        for t, size in enumerate(graph.size_of):
            live[max(life.producer[t], 0), size] += 1
            live[life.last_use[t] + 1, size] -= 1
            if graph.leaves[t]:
                away[life.forward[t] + 1, size] += 1
                away[life.backward[t], size] -= 1
        live = np.cumsum(live, axis=0)[:-1]
        return Demand(graph.sizes, live, live - np.cumsum(away, axis=0)[:-1])

    def least(self, cls: Ints) -> Ints:
        """[classes] smallest number of objects with which every operator can run."""
        return _most(self.bound, cls)

    def pools(self, factor: float, capacity: int) -> Pools:
        """Make classes of sizes within a factor, with as many objects as fit the capacity.

        Each class gets the objects that it needs at least, and the same share of the other objects
        that it could hold.
        """
        cls = np.zeros(len(self.sizes), np.int64)
        smallest = self.sizes[0]
        for i in range(1, len(cls)):
            wider = self.sizes[i] >= factor * smallest
            cls[i] = cls[i - 1] + wider
            smallest = self.sizes[i] if wider else smallest
        least, most = self.least(cls), _most(self.live, cls)
        each = object_bytes(self.sizes, cls)
        wish = int((most - least) @ each)
        share = (capacity - int(least @ each)) / wish if wish else 1.0
        cnt = least + np.floor((most - least) * min(max(share, 0.0), 1.0)).astype(np.int64)
        return repaired_counts(self.sizes, Pools(cls, cnt), capacity, least)


def _most(counts: Ints, cls: Ints) -> Ints:
    first = np.searchsorted(cls, np.arange(cls[-1] + 1))
    summed = np.add.reduceat(counts, first, axis=1)
    most: Ints = np.maximum(summed.max(axis=0, initial=0), 1)
    return most
