"""``bf16``, ``fp16``: wider floats rounded to two bytes (docs/format/cast.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.lossy import LossyTiledCodec
from cswap.codecs.tiled import TileFunctions
from cswap.schema.tensor import dtype_name
from cswap_kernels.cast import cast_decode_cpu, cast_encode_cpu
from cswap_kernels.floats import BFLOAT16, IEEE
from cswap_kernels.tiles import tile_decoder, tile_encoder

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType

_WIDER: Final = frozenset(("float64", "float32", "complex128", "complex64"))


class _Cast(LossyTiledCodec):
    # Two formats with the same kernels.

    def __init__(self, name: str, target: int) -> None:
        self.name = name
        self._args = np.array([IEEE, target], np.uint64)

    @property
    def cuda_format(self) -> str:
        """The same for every parameter."""
        return "cast"

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """What is wider than two bytes per real number."""
        return dtype_name(dtype) in _WIDER and self.runs_on(device, dtype)

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(cast_encode_cpu, dtype.word), tile_decoder(cast_decode_cpu, dtype.word)
        )

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[2] u64: how to read the words, and what to cast to."""
        return self._args


class CastBfloat16(_Cast):
    """Error: 2**-8 of the value. The range of float32 is kept."""

    def __init__(self) -> None:
        super().__init__("bf16", BFLOAT16)


class CastFloat16(_Cast):
    """Error: 2**-11 of the value, or 2**-25. A tile with a magnitude from 65520 on stays raw."""

    def __init__(self) -> None:
        super().__init__("fp16", IEEE)
