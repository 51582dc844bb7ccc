"""ZFP at one fixed rate for all dense tensors of a network, as CSwap+ chooses it.

Source: CSwap+, IEEE TPDS 33(12), 2022, section 5.2.2, Eq. 1-2 and Algorithm 1. A trace opts in with
`tensor_values.with_fixed_rates`, a machine with a rate of ``zfp``, which holds for every P.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from cswap.advisor.cswap_plus import SPARSITIES, Dense, sliding_down, top_bottom
from cswap.plan.tensor_values import FIXED_RATE_FAMILY, FIXED_RATE_MAX

MAX: Final = 512
"""Of P: bits of 16 float32, a block of 4 x 4, as in CSWAP's released code; the papers do not say.
With 32, bits of a value, the papers' step of P would round to 0 in most trainings. Codecs have
whole bits per value: P is rounded up to them."""

if TYPE_CHECKING:
    from cswap.advisor.cswap_plus import Swap
    from cswap.plan.simulate import Simulator


def zeros_of(simulator: Simulator, position: int) -> float:
    """The zero fraction that the trace knows of a tensor; 0 if none."""
    tensor = simulator.trace.tensors[simulator.swappable[position]]
    return float(tensor.profile.get("zero_fraction", 0.0))


def dense_positions(simulator: Simulator, ways: dict[int, Swap]) -> list[int]:
    """Moved tensors that ZFP may encode: floating, and too dense for the lossless codecs."""
    rates = [simulator.codecs.index(name) for name in _rates(simulator)]
    return [
        position
        for position in ways
        if rates
        and zeros_of(simulator, position) < SPARSITIES[0]
        and (simulator.ratios[position, rates] > 1.0).any()
    ]


def rate_of(simulator: Simulator, ways: dict[int, Swap], epoch: int, epochs: int) -> str | None:
    """ZFP at the epoch's rate P, such as ``zfp:12``; None: no lossy compression in this network."""
    dense = dense_positions(simulator, ways)
    if not dense:
        return None
    any_rate = simulator.codecs.index(_rates(simulator)[0])

    def seconds(position: int) -> tuple[float, float]:
        return (
            float(simulator.encode_s[position, any_rate]),
            float(simulator.decode_s[position, any_rate]),
        )

    tensors = [
        Dense(ways[p], lambda _, p=p: seconds(p)[0], lambda _, p=p: seconds(p)[1])  # type: ignore[misc]
        for p in dense
    ]
    found = top_bottom(tensors, MAX)
    if found is None:
        return None
    wanted = math.ceil(sliding_down(*found, epoch, epochs) * FIXED_RATE_MAX / MAX)
    known = sorted(int(name.partition(":")[2]) for name in _rates(simulator))
    milder = [rate for rate in known if rate >= wanted]
    return f"{FIXED_RATE_FAMILY}:{milder[0] if milder else known[-1]}"


def _rates(simulator: Simulator) -> list[str]:
    return [name for name in simulator.codecs if name.startswith(f"{FIXED_RATE_FAMILY}:")]
