"""The sparse codecs: they take any word, have no parameters, and keep every bit.

``zvc``, ``csr``, ``rle``: docs/format/zvc.md and so on.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.tiled import NO_ARGS, TiledCodec
from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap.schema.tensor import DTYPES, dtype_name
from cswap_kernels.csr import csr_decode_cpu, csr_encode_cpu
from cswap_kernels.rle import rle_decode_cpu, rle_encode_cpu
from cswap_kernels.zvc import zvc_decode_cpu, zvc_encode_cpu

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType, TensorProfile


class SparseTiledCodec(TiledCodec):
    """Base of the codecs that look for zeros and repeats, and do not interpret the words."""

    lossless = True

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Every dtype."""
        return dtype_name(dtype) in DTYPES and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """No arguments."""
        return NO_ARGS


def _zvc_ratio(profile: TensorProfile) -> float:
    word = word_bits(profile)
    return word / (1 + word * (1 - profile.zero_fraction))


def _csr_ratio(profile: TensorProfile) -> float:
    # A row of 256 words has a count of 16 bits; each word that is not zero a column of 8 bits.
    word = word_bits(profile)
    return word / (16 / 256 + (word + 8) * (1 - profile.zero_fraction))


def _rle_ratio(profile: TensorProfile) -> float:
    # A word per run, and a bit per word in each group of 64 words in which a run starts.
    word, repeats = word_bits(profile), profile.repeat_fraction
    return word / (word * (1 - repeats) + 1 - repeats**64 + 0.05)


class Zvc(SparseTiledCodec):
    """Zero-value compression. Shrinks words of w bits if more than one in w is zero."""

    name = "zvc"
    kernels = zvc_encode_cpu, zvc_decode_cpu
    traits = CodecTraits(
        predicted_ratio=_zvc_ratio,
        rates={"cpu": CodecRate(20e9, 16e9), "cuda": CodecRate(1100e9, 1100e9)},
        after_zvc=False,
    )


class Csr(SparseTiledCodec):
    """Compressed sparse rows. Smaller than zvc if more than 7/8 of the words are zero."""

    name = "csr"
    kernels = csr_encode_cpu, csr_decode_cpu
    traits = CodecTraits(
        predicted_ratio=_csr_ratio,
        rates={"cpu": CodecRate(18e9, 10e9), "cuda": CodecRate(620e9, 1100e9)},
        after_zvc=False,
    )


class Rle(SparseTiledCodec):
    """Run lengths. Good on padding, masks, and zeros in blocks."""

    name = "rle"
    kernels = rle_encode_cpu, rle_decode_cpu
    traits = CodecTraits(
        predicted_ratio=_rle_ratio,
        rates={"cpu": CodecRate(17e9, 17e9), "cuda": CodecRate(560e9, 310e9)},
    )
