"""Memory by operator, reckoned without time: a swapped tensor is away strictly between its uses."""

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
    """What operators need and what may be away while they run.

    Attributes:
        live: [m] bytes while each operator runs if nothing leaves.
        absent: [n, m] whether a position can be away while an operator runs.
        nbytes: [n] of each position.
        budget_bytes: device memory.
    """

    live: NDArray[np.int64]
    absent: NDArray[np.bool_]
    nbytes: NDArray[np.int64]
    budget_bytes: int

    @staticmethod
    def of(simulator: Simulator) -> Residency:
        """Of a simulator's trace and budget.

        A tensor is leaving while the operator after its last forward use runs, and coming back
        while the one before its first backward use runs: it is not away then.
        """
        operators = np.arange(len(simulator.trace.operators))
        absent = (operators > simulator.forward[:, None] + 1) & (
            operators < simulator.backward[:, None] - 1
        )
        live = np.array(live_bytes(simulator.trace), np.int64)
        return Residency(live, absent, simulator.nbytes, simulator.budget_bytes)

    def over(self, action: NDArray[np.int8]) -> NDArray[np.int64]:
        """[m] bytes over the budget while each operator runs; negative: room."""
        gone = (self.nbytes * (action != 0)) @ self.absent
        excess: NDArray[np.int64] = self.live - gone - self.budget_bytes
        return excess
