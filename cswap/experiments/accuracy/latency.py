"""Duration of a step's swaps on a simulated GPU."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cswap.plan.hardware import Hardware


def swap_s(
    by_codec: Mapping[str, Mapping[str, float]], eligible_bytes: float, hardware: Hardware
) -> float:
    """Seconds that a GPU of this profile would need to swap the step's tensors, one by one.

    Encode, copy out, copy in and decode, nothing hidden: CSwap+'s "swap latency". Tensors that the
    policy left in place on this CPU are copied raw there.

    Args:
        by_codec: raw and encoded bytes per step.
        eligible_bytes: bytes of all tensors that could be swapped.
        hardware: simulated; a codec without a rate there takes the rate of zvc.
    """
    staying = eligible_bytes - sum(c["raw"] for c in by_codec.values())
    seconds = raw_s(max(staying, 0.0), hardware)
    for codec, totals in by_codec.items():
        seconds += raw_s(totals["encoded"], hardware)
        rate = hardware.codecs.get(codec) or hardware.codecs["zvc"]
        if codec != "raw":
            seconds += totals["raw"] / rate.encode_bytes_per_s
            seconds += totals["raw"] / rate.decode_bytes_per_s
    return seconds


def raw_s(nbytes: float, hardware: Hardware) -> float:
    """Seconds to copy a number of bytes out and back."""
    return nbytes / hardware.d2h_bytes_per_s + nbytes / hardware.h2d_bytes_per_s
