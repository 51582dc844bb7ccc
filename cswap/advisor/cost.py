"""The cost model: predicted ratio from a profile, and cost = time on the device + price * bytes.

Torch-free: planners use it on traces.

Source: the decision "compress only if it pays" is CSwap+'s (TPDS 33(12), 2022, Eq. 3-7); here the
bytes are priced instead of simulated: `price_s_per_byte` is what a byte on the link, or in the
host's memory, is worth in seconds of the device.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final, Protocol

from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.schema.tensor import TensorProfile

K3, K4 = 2, 3
"""Index into `TensorProfile.spread` of the exponents that a code of 3 or 4 bits reaches."""


@dataclass(frozen=True, slots=True)
class Rate:
    """How fast a codec is on a device.

    Attributes:
        encode_bytes_per_s: raw bytes per second.
        decode_bytes_per_s: raw bytes per second.
        overhead_s: per tensor and direction, whatever its size.
    """

    encode_bytes_per_s: float
    decode_bytes_per_s: float
    overhead_s: float = 20e-6

    def device_s(self, profile: TensorProfile) -> float:
        """Seconds of encode and decode together."""
        per_byte = 1 / self.encode_bytes_per_s + 1 / self.decode_bytes_per_s
        return 2 * self.overhead_s + profile.nbytes * per_byte


class Times(Protocol):
    """How long a codec takes: assumed (`Rate`) or measured (`calibration.CodecTimes`)."""

    def device_s(self, profile: TensorProfile) -> float:
        """Seconds of encode and decode together."""
        ...


@dataclass(frozen=True, slots=True)
class Candidate:
    """One codec's predicted cost for one tensor.

    Attributes:
        codec: its name.
        ratio: predicted raw bytes over encoded bytes.
        device_s: predicted encode plus decode time, in seconds.
        cost_s: device_s plus the price of the encoded bytes, in seconds.
        nbytes: predicted encoded bytes.
    """

    codec: str
    ratio: float
    device_s: float
    cost_s: float
    nbytes: float


def _word_bits(profile: TensorProfile) -> int:
    return 8 * DTYPES[profile.dtype].word


def _ratio_zvc(p: TensorProfile) -> float:
    w = _word_bits(p)
    return w / (1 + w * (1 - p.zero_fraction))


def _ratio_csr(p: TensorProfile) -> float:
    w = _word_bits(p)
    return w / (16 / 256 + (w + 8) * (1 - p.zero_fraction))


def _ratio_rle(p: TensorProfile) -> float:
    # A word per run, and a bit per word in groups of 64 in which a run starts.
    w, repeats = _word_bits(p), p.repeat_fraction
    return w / (w * (1 - repeats) + 1 - repeats**64 + 0.05)


def _ratio_bitpack(p: TensorProfile) -> float:
    w = _word_bits(p)
    if DTYPES[p.dtype].kind == "bool":
        return 4096 / (512 + 12)  # of a tile: a bit per word, and its table
    return w / (w if p.int_bits is None else min(w, p.int_bits + 0.25))


def _expk_bits(p: TensorProfile, spread: tuple[float, ...], zeros: float) -> float:
    # A code of 3 or 4 bits for the exponent; an escape costs 3 bytes. Exponent 0 gets a code, too.
    d, w = DTYPES[p.dtype], _word_bits(p)
    escaped = [24 * max(0.0, 1 - within - zeros) for within in (spread[K3], spread[K4])]
    return min(w, w - d.exponent_bits + min(3 + escaped[0], 4 + escaped[1]))


def _ratio_expk(p: TensorProfile) -> float:
    zeros = max(p.zero_fraction, p.zero_exponent)
    return _word_bits(p) / _expk_bits(p, p.spread, zeros) if p.spread else 1.0


def _ratio_zvc_expk(p: TensorProfile) -> float:
    if not p.spread_nonzero:
        return 1.0
    rest = 1 - p.zero_fraction
    zeros = max(0.0, p.zero_exponent - p.zero_fraction) / max(rest, 1e-9)  # -0.0 and denormals
    survivors = rest * _expk_bits(p, p.spread_nonzero, zeros)
    return _word_bits(p) / (_bitmap_bits(p) + survivors)


def _bitmap_bits(p: TensorProfile) -> float:
    # Per word; a tile without zeros has no bitmap.
    return 1.0 if p.zero_fraction else 0.0


def _fixed(bits: float) -> Callable[[TensorProfile], float]:
    return lambda p: max(1.0, _word_bits(p) / bits) if p.non_finite == 0 else 1.0


def _sparse(bits: float) -> Callable[[TensorProfile], float]:
    def ratio(p: TensorProfile) -> float:
        if p.non_finite:
            return _ratio_zvc(p)
        survivors = (1 - p.zero_fraction) * min(bits, _word_bits(p))
        return _word_bits(p) / (_bitmap_bits(p) + survivors)

    return ratio


RATIOS: Final[dict[str, Callable[[TensorProfile], float]]] = {
    "keep": lambda _: 1.0,
    "raw": lambda _: 1.0,
    "zvc": _ratio_zvc,
    "csr": _ratio_csr,
    "rle": _ratio_rle,
    "bitpack": _ratio_bitpack,
    "expk": _ratio_expk,
    "zvc+expk": _ratio_zvc_expk,
    "bf16": _fixed(16),
    "fp16": _fixed(16),
    "int8": _fixed(8 + 32 / 128),
    "fp8": _fixed(8 + 32 / 128),
    "mxfp8": _fixed(8 + 8 / 32),
    "int4": _fixed(4 + 32 / 32),
    "zvc+int8": _sparse(8 + 32 / 128),
    "zvc+fp8": _sparse(8 + 32 / 128),
    "zvc+int4": _sparse(4 + 32 / 32),
}
"""Predicted ratio, before tiles that refuse, for each codec that the advisor considers."""


def predicted_ratio(codec: str, profile: TensorProfile) -> float:
    """Raw bytes over encoded bytes, from the profile alone; 1.0 for codecs without a formula."""
    formula = RATIOS.get(codec)
    return 1.0 if formula is None else max(1.0, formula(profile))  # what would grow is stored raw


def predict(
    codec: str,
    profile: TensorProfile,
    times: Times,
    price_s_per_byte: float,
    *,
    device_s: float | None = None,
    ratio_factor: float = 1.0,
    extra_s: float = 0.0,
) -> Candidate:
    """What this codec would cost for a tensor of this profile.

    Args:
        codec: its name, a key of `RATIOS`.
        profile: of the tensor.
        times: of the codec, for any tensor.
        price_s_per_byte: of encoded bytes.
        device_s: what measurements say instead of ``times``.
        ratio_factor: what they say about the predicted ratio.
        extra_s: what else a swap costs, whatever the codec.
    """
    ratio = max(1.0, predicted_ratio(codec, profile) * ratio_factor)
    device_s = (times.device_s(profile) if device_s is None else device_s) + extra_s
    nbytes = profile.nbytes / ratio
    return Candidate(codec, ratio, device_s, device_s + price_s_per_byte * nbytes, nbytes)
