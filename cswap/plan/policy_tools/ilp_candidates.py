"""Makes candidates from the relaxation of the swap ILP, by rounding its shares at random."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.policy_tools.swap_ilp import Ways, least_stall
from cswap.plan.simulate import KEEP, RECOMPUTE, SWAP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from cswap.plan.simulate import Simulator

    Choice = tuple[NDArray[np.int8], NDArray[np.int8]]

LARGEST: Final = 400_000
"""Largest product of tensors and operators: beyond it the relaxation takes too long."""

COUNT: Final = 40
_BLUR: Final = 0.2


def guesses(
    simulator: Simulator,
    codec: NDArray[np.int8],
    again_s: NDArray[np.float64],
    rng: np.random.Generator,
    limit_s: float | None,
) -> Iterator[Choice]:
    """Yield actions and codecs: first the likeliest action of each tensor, then more random ones.

    Yields nothing if the problem is large or if no solution fits.

    Args:
        simulator: simulator of the trace, the machine and the budget.
        codec: [n] codec of each tensor if it leaves encoded; 0: no codec.
        again_s: [n] seconds to compute each tensor again.
        rng: random generator of the rounding.
        limit_s: time limit of the relaxation in seconds.
    """
    n = len(simulator.saved)
    if not 0 < n * len(simulator.trace.operators) <= LARGEST:
        return
    rows = np.arange(n)
    codec_s = simulator.encode_s[rows, codec] + simulator.decode_s[rows, codec]
    ways = Ways(
        encoded_bytes=simulator.encoded_bytes[rows, codec],
        codec_s=np.where(codec > 0, simulator.hardware.codec_tax * codec_s, np.inf),
        again_s=np.where(simulator.recomputable, again_s, np.inf),
    )
    flow = least_stall(simulator, ways, relaxed=True, limit_s=limit_s)
    if flow is None:
        return
    shares = np.stack([flow.raw, flow.encoded, flow.dropped]).clip(0, 1)
    shares = np.vstack([(1 - shares.sum(axis=0)).clip(0, 1), shares])
    for i in range(COUNT):
        yield _rounded(shares, codec, rng, i / COUNT)


def _rounded(
    shares: NDArray[np.float64], codec: NDArray[np.int8], rng: np.random.Generator, chance: float
) -> Choice:
    if chance:
        odds = shares ** (1 / (_BLUR + chance))
        drawn = rng.random(shares.shape[1]) * odds.sum(axis=0)
        way = (odds.cumsum(axis=0) < drawn).sum(axis=0).clip(0, 3)
    else:
        way = shares.argmax(axis=0)
    action = np.array([KEEP, SWAP, SWAP, RECOMPUTE], np.int8)[way]
    return action, np.where(way == 2, codec, 0).astype(np.int8)
