"""``zvc``: a bit per word, then the words that are not zero (docs/format/zvc.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.sparse import SparseTiledCodec
from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap_kernels.zvc import zvc_decode_cpu, zvc_encode_cpu

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorProfile


def _predicted_ratio(profile: TensorProfile) -> float:
    word = word_bits(profile)
    return word / (1 + word * (1 - profile.zero_fraction))


class Zvc(SparseTiledCodec):
    """Zero-value compression. Shrinks words of w bits if more than one in w is zero."""

    name = "zvc"
    kernels = zvc_encode_cpu, zvc_decode_cpu
    traits = CodecTraits(
        predicted_ratio=_predicted_ratio,
        rates={"cpu": CodecRate(20e9, 16e9), "cuda": CodecRate(1100e9, 1100e9)},
        after_zvc=False,
    )
