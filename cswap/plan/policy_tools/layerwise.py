"""A plan's cost in the papers' model, which compares each transfer with the time of its layer.

Sources: vDNN, MICRO 2016, section III. X leaves while the layer that reads it last runs, and the
end of the layer waits for the copy. A tensor that a backward layer needs is fetched during the
preceding layer, whose end waits for the copy, too. CSWAP, IEEE Cluster 2021, Eq. 1-5, and CSwap+,
IEEE TPDS 33(12), 2022, Eq. 3-7, use the same model for compressed tensors; encodes and decodes are
never hidden. The simulator is a different model: its copies queue, and a later layer may hide the
rest of a copy.

Our reading of "the layer": the operators from one at which a tensor moves to the next such one.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cswap.advisor.cswap_plus import Swap
from cswap.plan.simulate import SWAP
from cswap.plan.simulator.lifetimes import live_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.simulate import Simulator


@dataclass(frozen=True, slots=True)
class Layerwise:
    """The cost of a candidate in the layer-by-layer model.

    Attributes:
        compute_s: sum of the operators' durations.
        exposed_s: seconds of transfers that exceed their layers.
        codec_s: seconds of encodes and decodes.
        swap_s: seconds of transfers and codecs, hidden or not: the papers' swap latency.
        average_bytes: mean of device memory over time, without encodings.
        peak_bytes: maximum of device memory.
    """

    compute_s: float
    exposed_s: float
    codec_s: float
    swap_s: float
    average_bytes: float
    peak_bytes: int

    @property
    def step_s(self) -> float:
        """Seconds of the step."""
        return self.compute_s + self.exposed_s + self.codec_s


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


def layerwise(simulator: Simulator, action: NDArray[np.int8], codec: NDArray[np.int8]) -> Layerwise:
    """The cost of a candidate. Tensors are kept or swapped; recomputed tensors count as kept.

    Args:
        simulator: simulator of the trace and the machine; its budget is ignored.
        action: as for `Simulator.run`.
        codec: as for `Simulator.run`.
    """
    moved = action == SWAP
    until, since = _boundaries(simulator, moved)
    durations = np.array([o.duration_s for o in simulator.trace.operators], np.float64)
    stretched, exposed_s, codec_s, swap_s = durations.copy(), 0.0, 0.0, 0.0
    for p, way in swaps(simulator, moved).items():
        chosen = int(codec[p])
        encoded = float(simulator.encoded_bytes[p, chosen])
        out_s, back_s = encoded / way.d2h_bytes_per_s, encoded / way.h2d_bytes_per_s
        waits = max(out_s - way.forward_s, 0.0), max(back_s - way.backward_s, 0.0)
        coding = float(simulator.encode_s[p, chosen]), float(simulator.decode_s[p, chosen])
        stretched[until[p] - 1] += waits[0] + coding[0]
        stretched[max(simulator.backward[p] - 1, 0)] += waits[1] + coding[1]
        exposed_s, codec_s = exposed_s + sum(waits), codec_s + sum(coding)
        swap_s += out_s + back_s + sum(coding)
    live = _live_bytes(simulator, moved, until, since)
    return Layerwise(
        float(durations.sum()),
        exposed_s,
        codec_s,
        swap_s,
        float(live @ stretched / stretched.sum()) if stretched.sum() else 0.0,
        int(live.max(initial=0)),
    )


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


def _live_bytes(
    simulator: Simulator,
    moved: NDArray[np.bool_],
    until: NDArray[np.int64],
    since: NDArray[np.int64],
) -> NDArray[np.int64]:
    """[m] device bytes while each operator runs."""
    unswapped = np.array(live_bytes(simulator.trace), np.int64)
    change = np.zeros(len(unswapped) + 1, np.int64)
    for p in np.flatnonzero(moved & (until < since)):
        change[until[p]] -= simulator.nbytes[p]
        change[since[p]] += simulator.nbytes[p]
    live: NDArray[np.int64] = unswapped + np.cumsum(change)[:-1]
    return live
