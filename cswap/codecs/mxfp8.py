"""``mxfp8``: OCP's MXFP8, E4M3 elements, groups of 32 (docs/format/mxfp8.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.lossy import LossyTiledCodec, fixed_rate
from cswap.codecs.tiled import TileFunctions
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap_kernels.mxfp8 import mxfp8_decode_cpu, mxfp8_encode_cpu
from cswap_kernels.tile_calls import tile_decoder, tile_encoder

if TYPE_CHECKING:
    from cswap.schema.tensor import DType


class Mxfp8(LossyTiledCodec):
    """Error: 2**-4 of the value (2**-3 if it saturates), or 2**-18 of the largest of its group."""

    name = "mxfp8"
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 8 / 32),
        relative_error=0.029,
        rates={"cpu": CodecRate(14e9, 13e9), "cuda": CodecRate(1300e9, 1400e9)},
    )

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(mxfp8_encode_cpu, dtype.word), tile_decoder(mxfp8_decode_cpu, dtype.word)
        )
