"""Memory by operator, without a model of time: a swapped tensor is away between its uses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulator.lifetimes import live_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.simulate import Simulator


@dataclass(frozen=True, slots=True)
class Residency:
    """The memory that operators need, and the tensors that may be away while they run.

    Attributes:
        live: [m] bytes while each operator runs if no tensor leaves.
        absent: [n, m] whether the tensor at a position can be away while an operator runs.
        nbytes: [n] bytes of each position.
        budget_bytes: device memory budget.
    """

    live: NDArray[np.int64]
    absent: NDArray[np.bool_]
    nbytes: NDArray[np.int64]
    budget_bytes: int

    @staticmethod
    def of(simulator: Simulator) -> Residency:
        """Build it for a simulator's trace and budget.

        A tensor leaves during the operator after its last forward use, and comes back during the
        operator before its first backward use. It does not count as away during these two.
        """
        operators = np.arange(len(simulator.trace.operators))
        absent = (operators > simulator.forward[:, None] + 1) & (
            operators < simulator.backward[:, None] - 1
        )
        live = np.array(live_bytes(simulator.trace), np.int64)
        return Residency(live, absent, simulator.nbytes, simulator.budget_bytes)

    def over(self, action: NDArray[np.int8]) -> NDArray[np.int64]:
        """[m] bytes over the budget while each operator runs; negative: free bytes."""
        gone = (self.nbytes * (action != 0)) @ self.absent
        excess: NDArray[np.int64] = self.live - gone - self.budget_bytes
        return excess
