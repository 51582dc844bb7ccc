"""``cswap+``: swaps vDNN's tensors; compresses a tensor if that shortens its swap (Eq. 3-7).

Source: CSwap+, IEEE TPDS 33(12), 2022, sections 5-6; the equations are in
`cswap.advisor.cswap_plus`. The hardware profile's rates take the place of measured times.

A tensor goes through ZVC if ZVC shortens its swap. Plans lose no precision: the paper's ZFP at a
rate that slides down from epoch to epoch is in the engine alone (``policy="cswap+"``).

The paper compares each transfer with the time of its layer, as vDNN does (MICRO 2016, section III):
X leaves while the layer that reads it last runs, and a tensor that a backward layer needs is
fetched during the preceding layer. Our reading of "the layer": the operators from one at which a
tensor moves to the next such one.

There are two differences from the paper. The rule counts encodings without bitmaps, as in the
paper, but the simulator counts the bitmaps. The paper never hides encodes; the simulator may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.advisor.cswap_plus import Swap, sparse_bytes
from cswap.plan.policy_tools.vdnn import feature_inputs, prefetch_points
from cswap.plan.simulate import SWAP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.simulate import Simulator
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap vDNN's tensors, through ZVC where the rule selects it."""
    simulator = problem.simulator
    moved = feature_inputs(problem.trace)
    action = np.where(moved, SWAP, 0).astype(np.int8)
    codec = np.zeros_like(action)
    if "zvc" in simulator.codecs:
        zvc = simulator.codecs.index("zvc")
        for position, way in swaps(simulator, moved).items():
            encode_s, decode_s = (
                simulator.encode_s[position, zvc],
                simulator.decode_s[position, zvc],
            )
            encoded = sparse_bytes(way.nbytes, _zeros_of(simulator, position))
            if way.pays(encoded, float(encode_s), float(decode_s)):
                codec[position] = zvc
    return simulator.to_plan(action, codec, prefetch_points(simulator, moved), "cswap+")


def _zeros_of(simulator: Simulator, position: int) -> float:
    # The zero fraction of a tensor in the trace; 0 if unknown.
    tensor = simulator.trace.tensors[simulator.swappable[position]]
    return float(tensor.profile.get("zero_fraction", 0.0))


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
