"""``rle``: runs of equal words (docs/format/rle.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.sparse import SparseTiledCodec
from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap_kernels.rle import rle_decode_cpu, rle_encode_cpu

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorProfile


def _predicted_ratio(profile: TensorProfile) -> float:
    # A word per run, and a bit per word in each group of 64 words in which a run starts.
    word, repeats = word_bits(profile), profile.repeat_fraction
    return word / (word * (1 - repeats) + 1 - repeats**64 + 0.05)


class Rle(SparseTiledCodec):
    """Run lengths. Good on padding, masks, and zeros in blocks."""

    name = "rle"
    kernels = rle_encode_cpu, rle_decode_cpu
    traits = CodecTraits(
        predicted_ratio=_predicted_ratio,
        rates={"cpu": CodecRate(17e9, 17e9), "cuda": CodecRate(560e9, 310e9)},
    )
