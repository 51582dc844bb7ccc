"""Swaps in the papers' model, which compares each transfer with the time of its layer.

Sources: vDNN, MICRO 2016, section III. X leaves while the layer that reads it last runs, and the
end of the layer waits for the copy. A tensor that a backward layer needs is fetched during the
preceding layer, whose end waits for the copy, too. CSWAP, IEEE Cluster 2021, Eq. 1-5, and CSwap+,
IEEE TPDS 33(12), 2022, Eq. 3-7, use the same model for compressed tensors; encodes and decodes are
never hidden. The simulator is a different model: its copies queue, and a later layer may hide the
rest of a copy.

Our reading of "the layer": the operators from one at which a tensor moves to the next such one.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.advisor.cswap_plus import Swap

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.simulate import Simulator


def swaps(simulator: Simulator, moved: NDArray[np.bool_]) -> dict[int, Swap]:
    """For each moved tensor: bytes, link rates, and the time of its layers, by position.

    Args:
        simulator: simulator of the trace and the machine.
        moved: [n] whether the tensor at a position moves.
    """
    hardware = simulator.hardware
    ends = np.concatenate([[0.0], np.cumsum([o.duration_s for o in simulator.trace.operators])])
    until, since = _boundaries(simulator, moved)
    return {
        int(p): Swap(
            float(simulator.nbytes[p]),
            hardware.d2h_bytes_per_s,
            hardware.h2d_bytes_per_s,
            float(ends[until[p]] - ends[simulator.forward[p]]),
            float(ends[simulator.backward[p]] - ends[since[p]]),
        )
        for p in np.flatnonzero(moved)
    }


def _boundaries(
    simulator: Simulator, moved: NDArray[np.bool_]
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """[n] operator before which the swap-out must end, and operator at which the swap-in begins."""
    forward, backward = simulator.forward, simulator.backward
    phases = [o.phase for o in simulator.trace.operators]
    turn = phases.index("backward") if "backward" in phases else len(phases)
    leaves = np.unique(np.append(forward[moved], turn))
    returns = np.unique(np.append(backward[moved], turn))
    until = leaves[np.minimum(np.searchsorted(leaves, forward, side="right"), len(leaves) - 1)]
    since = returns[np.maximum(np.searchsorted(returns, backward, side="left") - 1, 0)]
    return np.maximum(until, forward + 1), np.minimum(since, backward)
