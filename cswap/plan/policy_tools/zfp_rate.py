"""CSwap+'s choice of one fixed ZFP rate P for all dense tensors of a network.

Source: CSwap+, IEEE TPDS 33(12), 2022, section 5.2.2, Eq. 1-2 and Algorithm 1. It applies only if
the trace was made by `tensor_values.with_fixed_rates` and the machine has a rate for ``zfp``. The
machine's rate holds for every P.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.advisor.cswap_plus import (
    MAX,
    SPARSITIES,
    Dense,
    bits_per_value,
    top_bottom,
)
from cswap.plan.tensor_values import FIXED_RATE_FAMILY

if TYPE_CHECKING:
    from cswap.advisor.cswap_plus import Swap
    from cswap.plan.simulate import Simulator


def zeros_of(simulator: Simulator, position: int) -> float:
    """The zero fraction of a tensor in the trace; 0 if unknown."""
    tensor = simulator.trace.tensors[simulator.swappable[position]]
    return float(tensor.profile.get("zero_fraction", 0.0))


def dense_positions(simulator: Simulator, ways: dict[int, Swap]) -> list[int]:
    """Positions of moved tensors that ZFP may encode: they have ZFP ratios and few zeros."""
    rates = [simulator.codecs.index(name) for name in _rates(simulator)]
    return [
        position
        for position in ways
        if rates
        and zeros_of(simulator, position) < SPARSITIES[0]
        and (simulator.ratios[position, rates] > 1.0).any()
    ]


def rate_of(simulator: Simulator, ways: dict[int, Swap]) -> str | None:
    """The ZFP codec with the first epoch's rate P, such as ``zfp:12``; None: none is lossy."""
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
    wanted = bits_per_value(found[0])
    known = sorted(int(name.partition(":")[2]) for name in _rates(simulator))
    milder = [rate for rate in known if rate >= wanted]
    return f"{FIXED_RATE_FAMILY}:{milder[0] if milder else known[-1]}"


def _rates(simulator: Simulator) -> list[str]:
    return [name for name in simulator.codecs if name.startswith(f"{FIXED_RATE_FAMILY}:")]
