"""``int8``: groups of 128 share a scale and a zero point (docs/format/int8.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.lossy import LossyTiledCodec
from cswap.codecs.tiled import TileFunctions
from cswap_kernels.int8 import int8_decode_cpu, int8_encode_cpu
from cswap_kernels.tiles import tile_decoder, tile_encoder

if TYPE_CHECKING:
    from cswap.schema.tensor import DType


class Int8(LossyTiledCodec):
    """Error: half the step of the group, (max - min) / 510 with 0 counted among its values.

    Values below half a step that are not 0 become a whole step, not 0, if their side has codes.
    """

    name = "int8"

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(int8_encode_cpu, dtype.word), tile_decoder(int8_decode_cpu, dtype.word)
        )
