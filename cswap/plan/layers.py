"""A plan's cost by the papers' own equations: each tensor's transfer against its layer's time.

Sources: vDNN, MICRO 2016, section III (the end of a layer waits for its offload, and for the
prefetch that its backward has begun); CSWAP, IEEE Cluster 2021, Eq. 1-5, and CSwap+, IEEE TPDS
33(12), 2022, Eq. 3-7. The simulator is another model: there copies queue, and what one layer cannot
hide a later one may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.advisor.cswap_plus import Swap
from cswap.plan.simulate import SWAP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.simulate import Simulator


def swaps(simulator: Simulator, moved: NDArray[np.bool_]) -> dict[int, Swap]:
    """The way of each moved tensor, by position.

    What hides it are the operators from its own (last forward, first backward use) to the next one
    at which another tensor moves: our reading of "the layer".

    Args:
        simulator: of the trace and the machine.
        moved: [n] by position.
    """
    hardware = simulator.hardware
    ends = np.concatenate([[0.0], np.cumsum([o.duration_s for o in simulator.trace.operators])])
    forward_s = _hidden_s(ends, simulator.forward, moved)
    backward_s = _hidden_s(ends, simulator.backward, moved)
    return {
        int(p): Swap(
            float(simulator.nbytes[p]),
            hardware.d2h_bytes_per_s,
            hardware.h2d_bytes_per_s,
            float(forward_s[p]),
            float(backward_s[p]),
        )
        for p in np.flatnonzero(moved)
    }


def swap_cost_s(
    simulator: Simulator, action: NDArray[np.int8], codec: NDArray[np.int8]
) -> tuple[float, float]:
    """Seconds that a candidate adds to a step by Eq. 3-6: exposed transfers, and codecs.

    Args:
        simulator: of the trace and the machine.
        action: as for `Simulator.run`; what is not swapped costs nothing.
        codec: as for `Simulator.run`.
    """
    exposed_s = codec_s = 0.0
    for position, swap in swaps(simulator, action == SWAP).items():
        chosen = int(codec[position])
        exposed_s += swap.exposed_s(float(simulator.encoded_bytes[position, chosen]))
        codec_s += float(
            simulator.encode_s[position, chosen] + simulator.decode_s[position, chosen]
        )
    return exposed_s, codec_s


def _hidden_s(
    ends: NDArray[np.float64], at: NDArray[np.int64], moved: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """[n] seconds from each operator to the next at which something moves; the last one's own."""
    stops = np.unique(at[moved])
    place = np.searchsorted(stops, at, side="right")
    later = np.append(stops, -1)[np.minimum(place, len(stops))]
    until = np.where(place < len(stops), later, at + 1)
    hidden: NDArray[np.float64] = ends[until] - ends[at]
    return hidden
