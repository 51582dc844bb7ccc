"""``int4``: groups of 32 share a step; stochastic rounding (docs/format/int4.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.lossy import LossyTiledCodec, fixed_rate, float_kind
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap_kernels.int4 import int4_decode_cpu, int4_encode_cpu

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType

_U32: Final = 0xFFFFFFFF
_U64: Final = 0xFFFFFFFFFFFFFFFF


class Int4(LossyTiledCodec):
    """Error: at most a step of the group, (max - min) / 14; unbiased over keys.

    The exception is a group without negative values: a small value that is not 0 becomes a step.

    The bytes are a function of the tensor and of the key: its seed modulo 2**64, its tensor_id and
    step modulo 2**32.
    """

    name = "int4"
    kernels = int4_encode_cpu, int4_decode_cpu
    traits = CodecTraits(
        predicted_ratio=fixed_rate(4 + 32 / 32),
        relative_error=0.12,
        rates={"cpu": CodecRate(7e9, 16e9), "cuda": CodecRate(200e9, 1500e9)},
        rates_after_zvc={"cpu": CodecRate(9e9, 20e9), "cuda": CodecRate(280e9, 1000e9)},
    )

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[3] u64: the float format of the words, the seed, and tensor with step."""
        stream = (key.tensor_id & _U32) | (key.step & _U32) << 32
        return np.array([float_kind(dtype), key.seed & _U64, stream], np.uint64)
