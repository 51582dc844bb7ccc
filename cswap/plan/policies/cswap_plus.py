"""``cswap+``: swaps vDNN's tensors; compresses a tensor if that shortens its swap (Eq. 3-7).

Source: CSwap+, IEEE TPDS 33(12), 2022, sections 5-6; the equations are in
`cswap.advisor.cswap_plus`. The hardware profile's rates take the place of measured times.

A tensor goes through ZVC if ZVC shortens its swap. A tensor is dense if it has fewer zeros than the
paper's time models were fitted for. A dense tensor goes through ZFP at a fixed rate P if the trace
has ratios for it (`tensor_values.with_fixed_rates`); the plan then loses precision. The whole
network has one P. Algorithm 1 gives Top and Bottom from the dense tensors, and P slides down from
epoch to epoch. A plan is of the first epoch, with P = Top.

There are two differences from the paper. The rule counts encodings without bitmaps, as in the
paper, but the simulator counts the bitmaps. The paper never hides encodes; the simulator may.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.advisor.cswap_plus import sparse_bytes
from cswap.plan.policy_tools.layerwise import swaps
from cswap.plan.policy_tools.vdnn import feature_inputs, prefetch_points
from cswap.plan.policy_tools.zfp_rate import dense_positions, rate_of, zeros_of
from cswap.plan.simulate import SWAP

if TYPE_CHECKING:
    from cswap.advisor.cswap_plus import Swap
    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.simulate import Simulator
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap vDNN's tensors, compressed where the rule selects a codec."""
    simulator = problem.simulator
    moved = feature_inputs(problem.trace)
    action = np.where(moved, SWAP, 0).astype(np.int8)
    codec = np.zeros_like(action)
    ways = swaps(simulator, moved)
    if "zvc" in simulator.codecs:
        zvc = simulator.codecs.index("zvc")
        for position, way in ways.items():
            encoded = sparse_bytes(way.nbytes, zeros_of(simulator, position))
            if _pays(simulator, position, way, zvc, encoded):
                codec[position] = zvc
    rate = rate_of(simulator, ways)
    if rate is not None:
        for position in dense_positions(simulator, ways):
            zfp = simulator.codecs.index(rate)
            encoded = float(simulator.encoded_bytes[position, zfp])
            codec[position] = zfp if _pays(simulator, position, ways[position], zfp, encoded) else 0
    return simulator.to_plan(action, codec, prefetch_points(simulator, moved), "cswap+")


def _pays(simulator: Simulator, position: int, way: Swap, codec: int, encoded: float) -> bool:
    encode_s, decode_s = simulator.encode_s[position, codec], simulator.decode_s[position, codec]
    return way.pays(encoded, float(encode_s), float(decode_s))
