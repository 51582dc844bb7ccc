"""What the lossy codecs of tiles share (docs/format/lossy.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.tiled import TiledCodec
from cswap.schema.tensor import dtype_name
from cswap_kernels.floats import BFLOAT16, IEEE

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType

FLOATS: Final = frozenset(
    ("float64", "float32", "float16", "bfloat16", "complex128", "complex64", "complex32")
)
"""Dtypes of real words of 2, 4 or 8 bytes."""

_BFLOAT16_MANTISSA_BITS: Final = 7


def float_kind(dtype: DType) -> int:
    """How kernels are to read the words of one of `FLOATS`."""
    return BFLOAT16 if dtype.mantissa_bits == _BFLOAT16_MANTISSA_BITS else IEEE


class LossyTiledCodec(TiledCodec):
    """Base of the lossy tiled codecs: floats only.

    Computes in float32. float64 is rounded to that first: what overflows is stored raw, what
    is below 2**-150 becomes 0.
    """

    lossless = False

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Floats and complex of two bytes per real number or more."""
        return dtype_name(dtype) in FLOATS and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[1] u64: how to read the words."""
        return np.array([float_kind(dtype)], np.uint64)
