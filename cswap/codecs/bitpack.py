"""``bitpack``: integers and bools in the fewest bits per tile (docs/format/bitpack.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.codecs.tiled import TiledCodec, TileFunctions
from cswap.schema.tensor import DTYPES, dtype_name
from cswap_kernels.bitpack import bitpack_decode_cpu, bitpack_encode_cpu
from cswap_kernels.tiles import tile_decoder, tile_encoder

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType


class Bitpack(TiledCodec):
    """Bools to a bit, integers to the bits of their range in a tile."""

    name = "bitpack"
    lossless = True

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Integers and bools."""
        d = DTYPES.get(dtype_name(dtype))
        takes = d is not None and d.kind in ("int", "uint", "bool")
        return takes and self.runs_on(device, dtype)

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(bitpack_encode_cpu, dtype.word),
            tile_decoder(bitpack_decode_cpu, dtype.word),
        )

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """The sign bit, which is flipped so that order is unsigned; 0 for unsigned words."""
        sign = 1 << (8 * dtype.word - 1) if dtype.kind == "int" else 0
        return np.array([sign], np.uint64)
