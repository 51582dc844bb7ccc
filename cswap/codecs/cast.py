"""``bf16``, ``fp16``: wider floats rounded to two bytes (docs/format/cast.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.lossy import LossyTiledCodec, fixed_rate
from cswap.codecs.traits import LOSSLESS, CodecRate, CodecTraits
from cswap.schema.tensor import dtype_name
from cswap_kernels.cast import cast_decode_cpu, cast_encode_cpu
from cswap_kernels.floats import BFLOAT16, IEEE

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType

_WIDER: Final = frozenset(("float64", "float32", "complex128", "complex64"))


class _Cast(LossyTiledCodec):
    # Base of two formats with the same kernels.

    kernels = cast_encode_cpu, cast_decode_cpu

    def __init__(self, name: str, target: int) -> None:
        self.name = name
        self._args = np.array([IEEE, target], np.uint64)

    @property
    def cuda_format(self) -> str:
        """The same twin for both targets."""
        return "cast"

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Floats and complex of more than two bytes per real number."""
        return dtype_name(dtype) in _WIDER and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[2] u64: the float format of the words, and the format to cast to."""
        return self._args


class CastBfloat16(_Cast):
    """Error: 2**-8 of the value. The range of float32 is kept."""

    # fp16's error is smaller, but its range ends at 65504: the guard does not take it for milder.
    traits = CodecTraits(
        predicted_ratio=fixed_rate(16),
        relative_error=0.0017,
        milder=LOSSLESS,
        rates={"cpu": CodecRate(26e9, 18e9), "cuda": CodecRate(1200e9, 1200e9)},
    )

    def __init__(self) -> None:
        super().__init__("bf16", BFLOAT16)


class CastFloat16(_Cast):
    """Error: 2**-11 of the value, or 2**-25. A tile with a magnitude from 65520 on stays raw."""

    traits = CodecTraits(
        predicted_ratio=fixed_rate(16),
        relative_error=0.00021,
        rates={"cpu": CodecRate(28e9, 19e9), "cuda": CodecRate(1200e9, 1200e9)},
    )

    def __init__(self) -> None:
        super().__init__("fp16", IEEE)
