"""Base of the lossy codecs of tiles (docs/format/lossy.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.tiled import TiledCodec
from cswap.codecs.traits import word_bits
from cswap.schema.tensor import dtype_name
from cswap_kernels.floats import BFLOAT16, IEEE

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
