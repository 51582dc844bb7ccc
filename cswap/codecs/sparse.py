"""Base of the sparse codecs: they take any word, have no parameters, and keep every bit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.tiled import NO_ARGS, TiledCodec
from cswap.schema.tensor import DTYPES, dtype_name

if TYPE_CHECKING:
    import numpy as np
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType


class SparseTiledCodec(TiledCodec):
    """Base of the codecs that look for zeros and repeats, and do not interpret the words."""

    lossless = True

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Every dtype."""
        return dtype_name(dtype) in DTYPES and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """No arguments."""
        return NO_ARGS
