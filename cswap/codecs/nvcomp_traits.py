"""Traits of nvCOMP's lossless codecs: how far they shrink a tensor, and how fast. Needs no torch.

A prediction uses only facts of the profile, and takes the worst case for the rest, because a
codec that is overrated is chosen, and then disappoints. The advisor corrects it by measured sizes.

Note [rates that others have published]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
All rates are by NVIDIA's figures, of large data on other GPUs than the user's, not measured by us.
Rates without a source are assumed, and slow on purpose. `cswap calibrate` and measured round trips
replace them.

ANS       180 and 240 GB/s, on a B200. "Cut Checkpoint Costs with About 30 Lines of Python and
          NVIDIA nvCOMP", NVIDIA Technical Blog, 2026-04-09. Its figures are taken from others who
          quote it, and some quote higher ones (530). Bytes take twice the time: nvCOMP's release
          notes, 5.3.0, on its float8 mode.
Cascaded  184 and 229 GB/s of 64-bit integers, on a V100: README of github.com/NVIDIA/nvcomp, 2.0.
LZ4       37 and 118 GB/s of repetitive integers, on an RTX 3090: the same, 2.1. On an A100, 90 and
          313 (doc/Benchmarks.md). Of text, on a V100 with the first releases, 3 and 27; but only
          repeats are foretold to shrink here.
Snappy    "Comparable to LZ4": nvCOMP's documentation, "Algorithm Selection".
Zstd      Encodes 16 GB/s of a checkpoint: as ANS. Decoding is assumed.
Others    Assumed. The documentation has "High" for Bitcomp, which counts as `UNKNOWN_RATES`, and
          "Low" for Deflate and for GDeflate's encoder.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap.schema.tensor import DTYPES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cswap.schema.tensor import TensorProfile

ANS_FLOATS: Final = {2: "<f2", 4: "<f4"}
"""nvCOMP's data type in which ANS codes the exponents of floats, by the bytes of a word."""

_CODING_BITS: Final = 0.2
"""Bits per symbol that ANS takes above the entropy. Assumed: normal values in bfloat16 then have
the ratio 1.46, which NVIDIA's blog is quoted with for weights in bfloat16 (see the note)."""

_OVERHEAD_S: Final = 50e-6
"""Per tensor and direction. Assumed: calls of nvCOMP's Python take longer than a launch."""


def _entropy(shares: Iterable[float]) -> float:
    return -sum(p * math.log2(p) for p in shares if p > 0)


def exponent_bits(profile: TensorProfile) -> float:
    """Upper bound of the entropy of a word's exponent, in bits.

    The profile has shares of exponents by their distance from the largest nearby. Within a group of
    distances, all count as equally likely, which is the largest entropy that they can have.
    Source: Cover and Thomas, Elements of Information Theory, the chain rule (section 2.2). Where
    the largest exponent differs from piece to piece of a chunk, which a profile does not show, the
    entropy is larger.
    """
    zeros = max(profile.zero_fraction, profile.zero_exponent)
    within = [min(share, 1 - zeros) for share in profile.spread]
    inner = [b - a for a, b in zip((0.0, *within), within, strict=False)]
    groups = (*inner, 1 - zeros - within[-1], zeros)
    sizes = (1, 2, 4, 8, 2 ** DTYPES[profile.dtype].exponent_bits - 16, 1)
    inside = sum(p * math.log2(n) for p, n in zip(groups, sizes, strict=True) if p > 0)
    return _entropy(groups) + inside


def _ans(profile: TensorProfile) -> float:
    # Exponents at their entropy, sign and mantissa verbatim.
    d = DTYPES[profile.dtype]
    if not profile.spread or d.word not in ANS_FLOATS:
        return _ans_of_bytes(profile)
    word = word_bits(profile)
    return word / (word - d.exponent_bits + exponent_bits(profile) + _CODING_BITS)


def _ans_of_bytes(profile: TensorProfile) -> float:
    # Which words are zero, at the entropy of that; bytes of other words verbatim, and those of
    # bools, which are all the same, for nothing. Upper bound of the entropy of all bytes.
    if not profile.sampled:
        return 1.0
    zeros = profile.zero_fraction
    other = 0.0 if profile.dtype == "bool" else 8 * (1 - zeros)
    return 8 / (_entropy((zeros, 1 - zeros)) + other + _CODING_BITS)


def _runs(least: int, per_run: int, per_byte: float) -> Callable[[TensorProfile], float]:
    # Of codecs that find repeats. Runs of a word count, since a profile shows no other repeats: its
    # first word, ``per_run`` bytes, and ``per_byte`` for each byte that repeats. Runs shorter than
    # ``least`` bytes are not found.
    def ratio(profile: TensorProfile) -> float:
        word = word_bits(profile) // 8
        repeats: float = profile.repeat_fraction ** max(1.0, least / word)
        return word / ((1 - repeats) * (word + per_run) + repeats * word * per_byte)

    return ratio


def _cascaded(profile: TensorProfile) -> float:
    # Runs, of which each has a value in the bits of the integers' range, and a byte for its length;
    # and 64 bytes for each 4096, which it encodes on their own.
    word = word_bits(profile)
    value = word if profile.int_bits is None else min(word, profile.int_bits + 1)
    return word / ((1 - profile.repeat_fraction) * (value + 8) + word / 64)


def _bitcomp(profile: TensorProfile) -> float:
    # Its format is not published. Integers: their range, with two bits for whatever else it needs.
    # NVIDIA's blog has 1.0 for the values of dense checkpoints.
    word = word_bits(profile)
    return 1.0 if profile.int_bits is None else word / min(word, profile.int_bits + 2)


def _bitcomp_sparse(profile: TensorProfile) -> float:
    # Not published, either. As ``zvc``, with two bits per word instead of one.
    word = word_bits(profile)
    return word / (2 + word * (1 - profile.zero_fraction))


_lz4 = _runs(4, 3, 1 / 255)  # docs of LZ4's block format: 4 bytes at least, 255 per length byte
_snappy = _runs(4, 4, 3 / 64)  # Snappy's format: a copy of at most 64 bytes takes 3


def _with_entropy(profile: TensorProfile) -> float:
    # Repeats, or the entropy of bytes: each of these codecs has both.
    return max(_lz4(profile), _ans_of_bytes(profile))


def _traits(
    predicted_ratio: Callable[[TensorProfile], float], encode: float = 0.0, decode: float = 0.0
) -> CodecTraits:
    # Rates in 1e9 bytes per second; 0: `UNKNOWN_RATES`.
    if not encode:
        return CodecTraits(predicted_ratio)
    rate = CodecRate(1e9 * encode, 1e9 * decode, _OVERHEAD_S, assumed=True)
    return CodecTraits(predicted_ratio, rates={"cuda": rate})


TRAITS: Final = {
    "nvcomp-ans": _traits(_ans, 180, 240),
    "nvcomp-ans:1": _traits(_ans_of_bytes, 90, 120),
    "nvcomp-bitcomp": _traits(_bitcomp),
    "nvcomp-bitcomp-sparse": _traits(_bitcomp_sparse),
    "nvcomp-cascaded": _traits(_cascaded, 180, 220),
    "nvcomp-lz4": _traits(_lz4, 36, 118),
    "nvcomp-snappy": _traits(_snappy, 36, 118),
    "nvcomp-gdeflate": _traits(_with_entropy, 5, 50),
    "nvcomp-deflate": _traits(_with_entropy, 5, 5),
    "nvcomp-zstd": _traits(_with_entropy, 15, 15),
}
"""By codec. ``codec="auto"`` considers these where nvCOMP is installed."""
