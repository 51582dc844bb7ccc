"""``rle``: runs of equal words (docs/format/rle.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.sparse import SparseTiledCodec
from cswap.codecs.tiled import TileFunctions
from cswap_kernels.rle import rle_decode_cpu, rle_encode_cpu
from cswap_kernels.tiles import tile_decoder, tile_encoder

if TYPE_CHECKING:
    from cswap.schema.tensor import DType


class Rle(SparseTiledCodec):
    """Run lengths. Good on padding, masks, and zeros in blocks."""

    name = "rle"

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(rle_encode_cpu, dtype.word), tile_decoder(rle_decode_cpu, dtype.word)
        )
