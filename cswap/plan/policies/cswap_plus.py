"""``cswap+``: vDNN's tensors, each compressed if that shortens its swap (Eq. 3-7), else raw.

Source: CSwap+, IEEE TPDS 33(12), 2022, sections 5-6; the equations are in
`cswap.advisor.cswap_plus`. The profile's rates stand for measured times. ZVC where that pays; a
tensor with fewer zeros than the paper's time models are fitted from is dense and goes through ZFP
at a fixed rate P, if the trace has ratios of it (`tensor_values.with_fixed_rates`: a plan then
loses precision). P is one for the whole network: Top and Bottom by Algorithm 1 over the dense
tensors, sliding down from epoch to epoch. `solve` plans the first epoch, at Top; `solve_epoch` any.
The rule counts encodings without bitmaps, as the paper does; a plan is
judged with them. Encodings hide as the simulator says, not the paper's "never".
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
    """Swap what vDNN swaps, compressed where the rule says so."""
    return solve_epoch(problem, 0, 1)


def solve_epoch(problem: Problem, epoch: int, epochs: int) -> Plan:
    """The plan of one epoch of several: ZFP's rate slides down from one to the next."""
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
    rate = rate_of(simulator, ways, epoch, epochs)
    if rate is not None:
        for position in dense_positions(simulator, ways):
            zfp = simulator.codecs.index(rate)
            encoded = float(simulator.encoded_bytes[position, zfp])
            codec[position] = zfp if _pays(simulator, position, ways[position], zfp, encoded) else 0
    return simulator.to_plan(action, codec, prefetch_points(simulator, moved), "cswap+")


def _pays(simulator: Simulator, position: int, way: Swap, codec: int, encoded: float) -> bool:
    encode_s, decode_s = simulator.encode_s[position, codec], simulator.decode_s[position, codec]
    return way.pays(encoded, float(encode_s), float(decode_s))
