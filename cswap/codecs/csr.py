"""``csr``: columns and values of the words that are not zero, row by row (docs/format/csr.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.sparse import SparseTiledCodec
from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap_kernels.csr import csr_decode_cpu, csr_encode_cpu

if TYPE_CHECKING:
    from cswap.schema.tensor import TensorProfile


def _predicted_ratio(profile: TensorProfile) -> float:
    # A row of 256 words has a count of 16 bits; each word that is not zero a column of 8 bits.
    word = word_bits(profile)
    return word / (16 / 256 + (word + 8) * (1 - profile.zero_fraction))


class Csr(SparseTiledCodec):
    """Compressed sparse rows. Smaller than zvc if more than 7/8 of the words are zero."""

    name = "csr"
    kernels = csr_encode_cpu, csr_decode_cpu
    traits = CodecTraits(
        predicted_ratio=_predicted_ratio,
        rates={"cpu": CodecRate(18e9, 10e9), "cuda": CodecRate(620e9, 1100e9)},
        after_zvc=False,
    )
