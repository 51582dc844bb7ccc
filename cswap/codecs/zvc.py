"""``zvc``: a bit per word, then the words that are not zero (docs/format/zvc.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.sparse import SparseTiledCodec
from cswap.codecs.tiled import TileFunctions
from cswap_kernels.tiles import tile_decoder, tile_encoder
from cswap_kernels.zvc import zvc_decode_cpu, zvc_encode_cpu

if TYPE_CHECKING:
    from cswap.schema.tensor import DType


class Zvc(SparseTiledCodec):
    """Zero-value compression. Pays from one zero in as many words as a word has bits."""

    name = "zvc"

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(zvc_encode_cpu, dtype.word), tile_decoder(zvc_decode_cpu, dtype.word)
        )
