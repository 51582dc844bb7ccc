"""``expk``: exponents in 3 or 4 bits, sign and mantissa verbatim (docs/format/expk.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.codecs.tiled import TiledCodec, TileFunctions
from cswap.errors import ConfigError
from cswap.schema.tensor import DTYPES, dtype_name
from cswap_kernels.expk import expk_decode_cpu, expk_encode_cpu
from cswap_kernels.tiles import tile_decoder, tile_encoder

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType


class Expk(TiledCodec):
    """Exponents as distances from the tile's largest; ``expk:3`` and ``expk:4`` fix the bits."""

    lossless = True

    def __init__(self, k: int = 0) -> None:
        """Args: k: bits of a code, 3 or 4; 0 takes the cheaper per tile.

        Raises:
            ConfigError: another k.
        """
        if k not in (0, 3, 4):
            raise ConfigError(f"codec='expk:{k}': k must be 3 or 4; leave it out for the cheaper.")
        self.name = f"expk:{k}" if k else "expk"
        self._k = k

    @property
    def cuda_format(self) -> str:
        """The same for every parameter."""
        return "expk"

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Floats and complex numbers of words of 2 bytes and more."""
        d = DTYPES.get(dtype_name(dtype))
        takes = d is not None and d.kind == "float" and d.word > 1
        return takes and self.runs_on(device, dtype)

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(expk_encode_cpu, dtype.word), tile_decoder(expk_decode_cpu, dtype.word)
        )

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """Exponent bits, mantissa bits, k."""
        return np.array([dtype.exponent_bits, dtype.mantissa_bits, self._k], np.uint64)
