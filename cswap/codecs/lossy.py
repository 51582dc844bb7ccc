"""The lossy codecs of tiles (docs/format/lossy.md).

``int8``, ``fp8``, ``mxfp8`` and ``int4``, whose groups of words share a scale; and ``bf16`` and
``fp16``, wider floats rounded to two bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.tiled import TiledCodec
from cswap.codecs.traits import LOSSLESS, CodecRate, CodecTraits, word_bits
from cswap.schema.tensor import dtype_name
from cswap_kernels.cast import cast_decode_cpu, cast_encode_cpu
from cswap_kernels.floats import BFLOAT16, IEEE
from cswap_kernels.fp8 import fp8_decode_cpu, fp8_encode_cpu
from cswap_kernels.int4 import int4_decode_cpu, int4_encode_cpu
from cswap_kernels.int8 import int8_decode_cpu, int8_encode_cpu
from cswap_kernels.mxfp8 import mxfp8_decode_cpu, mxfp8_encode_cpu

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType, TensorProfile

FLOATS: Final = frozenset(
    ("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32")
)
"""Dtypes of real words of 2, 4 or 8 bytes."""

_WIDER: Final = frozenset(("float64", "float32", "complex128", "complex64"))

_U32: Final = 0xFFFFFFFF
_U64: Final = 0xFFFFFFFFFFFFFFFF

_BFLOAT16_MANTISSA_BITS: Final = 7


def float_kind(dtype: DType) -> int:
    """The kernels' code of the float format of a dtype in `FLOATS`."""
    return BFLOAT16 if dtype.mantissa_bits == _BFLOAT16_MANTISSA_BITS else IEEE


def fixed_rate(bits: float) -> Callable[[TensorProfile], float]:
    """Predicted ratio of a codec that takes a fixed number of bits per word for all values.

    A tile with NaN or an infinity is stored raw. So the ratio is 1 if the sample has such a value.
    """

    def ratio(profile: TensorProfile) -> float:
        return 1.0 if profile.non_finite else word_bits(profile) / bits

    return ratio


class LossyTiledCodec(TiledCodec):
    """Base of the lossy tiled codecs: floats only.

    Kernels compute in float32. float64 is rounded to float32 first: tiles with a value that
    overflows are stored raw, values below 2**-150 become 0.
    """

    lossless = False

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Floats and complex of two bytes per real number or more."""
        return dtype_name(dtype) in FLOATS and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[1] u64: the float format of the words."""
        return np.array([float_kind(dtype)], np.uint64)


class Int8(LossyTiledCodec):
    """Error: half the step of the group, (max - min) / 510, where 0 counts as one of its values.

    A nonzero value below half a step becomes a whole step, if its sign has codes.
    """

    name = "int8"
    kernels = int8_encode_cpu, int8_decode_cpu
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 32 / 128),
        relative_error=0.0061,
        rates={"cpu": CodecRate(19e9, 20e9), "cuda": CodecRate(1300e9, 1400e9)},
        rates_after_zvc={"cpu": CodecRate(14e9, 14e9), "cuda": CodecRate(770e9, 1000e9)},
    )


class Fp8(LossyTiledCodec):
    """Error: 2**-4 of the value, or 2**-10 / 448 of the largest of its group if that is more."""

    name = "fp8"
    kernels = fp8_encode_cpu, fp8_decode_cpu
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 32 / 128),
        relative_error=0.026,
        rates={"cpu": CodecRate(14e9, 19e9), "cuda": CodecRate(1200e9, 1400e9)},
        rates_after_zvc={"cpu": CodecRate(11e9, 13e9), "cuda": CodecRate(750e9, 1000e9)},
    )


class Mxfp8(LossyTiledCodec):
    """Error: 2**-4 of the value (2**-3 if it saturates), or 2**-18 of the largest of its group."""

    name = "mxfp8"
    kernels = mxfp8_encode_cpu, mxfp8_decode_cpu
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 8 / 32),
        relative_error=0.029,
        rates={"cpu": CodecRate(14e9, 13e9), "cuda": CodecRate(1300e9, 1400e9)},
    )


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


class _Cast(LossyTiledCodec):
    # Base of two formats with the same kernels.

    kernels = cast_encode_cpu, cast_decode_cpu
    cuda_format = "cast"
    target: int

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Floats and complex of more than two bytes per real number."""
        return dtype_name(dtype) in _WIDER and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[2] u64: the float format of the words, and the format to cast to."""
        return np.array([IEEE, self.target], np.uint64)


class CastBfloat16(_Cast):
    """Error: 2**-8 of the value. The range of float32 is kept."""

    name, target = "bf16", BFLOAT16
    # fp16's error is smaller, but its range ends at 65504: the guard does not take it for milder.
    traits = CodecTraits(
        predicted_ratio=fixed_rate(16),
        relative_error=0.0017,
        milder=LOSSLESS,
        rates={"cpu": CodecRate(26e9, 18e9), "cuda": CodecRate(1200e9, 1200e9)},
    )


class CastFloat16(_Cast):
    """Error: 2**-11 of the value, or 2**-25. A tile with a magnitude from 65520 on stays raw."""

    name, target = "fp16", IEEE
    traits = CodecTraits(
        predicted_ratio=fixed_rate(16),
        relative_error=0.00021,
        rates={"cpu": CodecRate(28e9, 19e9), "cuda": CodecRate(1200e9, 1200e9)},
    )
