"""``fp8``: E4M3 elements, groups of 128 share a float32 scale (docs/format/fp8.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.lossy import LossyTiledCodec, fixed_rate
from cswap.codecs.tiled import TileFunctions
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap_kernels.fp8 import fp8_decode_cpu, fp8_encode_cpu
from cswap_kernels.tile_calls import tile_decoder, tile_encoder

if TYPE_CHECKING:
    from cswap.schema.tensor import DType


class Fp8(LossyTiledCodec):
    """Error: 2**-4 of the value, or 2**-10 / 448 of the largest of its group if that is more."""

    name = "fp8"
    traits = CodecTraits(
        predicted_ratio=fixed_rate(8 + 32 / 128),
        relative_error=0.026,
        rates={"cpu": CodecRate(14e9, 19e9), "cuda": CodecRate(1300e9, 1400e9)},
        rates_after_zvc={"cpu": CodecRate(11e9, 13e9), "cuda": CodecRate(750e9, 1000e9)},
    )

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(fp8_encode_cpu, dtype.word), tile_decoder(fp8_decode_cpu, dtype.word)
        )
