"""``csr``: columns and values of the words that are not zero, row by row (docs/format/csr.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.sparse import SparseTiledCodec
from cswap.codecs.tiled import TileFunctions
from cswap_kernels.csr import csr_decode_cpu, csr_encode_cpu
from cswap_kernels.tiles import tile_decoder, tile_encoder

if TYPE_CHECKING:
    from cswap.schema.tensor import DType


class Csr(SparseTiledCodec):
    """Compressed sparse rows. Ahead of zvc from 7/8 zeros on."""

    name = "csr"

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(csr_encode_cpu, dtype.word), tile_decoder(csr_decode_cpu, dtype.word)
        )
