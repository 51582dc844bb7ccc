"""``cswap+``: vDNN's tensors, each through ZVC if that shortens its swap (Eq. 3-7), else raw.

Source: CSwap+, IEEE TPDS 33(12), 2022, sections 5-6; the equations are in
`cswap.advisor.cswap_plus`. The profile's rates stand for measured times of ZVC. A tensor's transfer
hides behind the operators until the next tensor leaves (comes back): our reading of "the layer".
Dense tensors go raw: profiles have no rates of ZFP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.advisor.cswap_plus import Swap, sparse_bytes
from cswap.plan.simulate import SWAP
from cswap.plan.vdnn import features_of, inputs_of, prefetch_points

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.problem import Problem
    from cswap.plan.simulate import Simulator
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap what vDNN swaps, compressed where the rule says so."""
    simulator = problem.simulator
    moved = inputs_of(problem.trace, features_of(problem.trace))
    action = np.where(moved, SWAP, 0).astype(np.int8)
    codec = np.zeros_like(action)
    if "zvc" in simulator.codecs:
        zvc = simulator.codecs.index("zvc")
        for position in np.flatnonzero(moved):
            if _pays(simulator, int(position), moved, zvc):
                codec[position] = zvc
    return simulator.to_plan(action, codec, prefetch_points(simulator, moved), "cswap+")


def _pays(simulator: Simulator, position: int, moved: NDArray[np.bool_], zvc: int) -> bool:
    tensor = simulator.trace.tensors[simulator.swappable[position]]
    zeros = tensor.profile.get("zero_fraction", 0.0)
    swap = Swap(
        float(tensor.nbytes),
        simulator.hardware.d2h_bytes_per_s,
        simulator.hardware.h2d_bytes_per_s,
        _hidden_s(simulator, simulator.forward, position, moved),
        _hidden_s(simulator, simulator.backward, position, moved),
    )
    encode_s, decode_s = simulator.encode_s[position, zvc], simulator.decode_s[position, zvc]
    return swap.pays(sparse_bytes(tensor.nbytes, zeros), float(encode_s), float(decode_s))


def _hidden_s(
    simulator: Simulator, at: NDArray[np.int64], position: int, moved: NDArray[np.bool_]
) -> float:
    # Seconds of the operators from one tensor's operator to the next one's that moves.
    here = int(at[position])
    later = at[moved & (at > here)]
    end = int(later.min()) if later.size else here + 1
    return sum(o.duration_s for o in simulator.trace.operators[here:end])
