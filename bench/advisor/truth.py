"""Measured bytes, and seconds on this CPU, of every codec on every recorded tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from cswap.advisor.candidates import RAW, lossless_candidates, lossy_candidates
from cswap.advisor.round_trip import round_trip
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Mapping

    from bench.advisor.recording import Recording

LOSSLESS: Final = (RAW, *lossless_candidates())
MODES: Final = {"lossless": LOSSLESS, "int8": (*LOSSLESS, *lossy_candidates("int8"))}
"""Codecs that the advisor may choose, by value of the option ``lossy``."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """One codec on one tensor.

    Attributes:
        nbytes: bytes of the encoding.
        encode_s: encode seconds on this CPU, one thread.
        decode_s: decode seconds on this CPU, one thread.
    """

    nbytes: int
    encode_s: float
    decode_s: float


def outcomes(recording: Recording, *, repeat: int) -> list[Mapping[str, Outcome]]:
    """Per tensor, the outcome of every codec that takes it."""
    found: list[Mapping[str, Outcome]] = []
    for x in recording.tensors:
        of_tensor = {}
        for name in MODES["int8"]:
            codec = get_codec(name)
            if codec.supports(x.dtype):
                round_trip(codec, x, repeat=1)  # compiles, warms caches
                of_tensor[name] = Outcome(*round_trip(codec, x, repeat=repeat))
        found.append(of_tensor)
    return found
