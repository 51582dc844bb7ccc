"""``int4``: groups of 32 share a step; stochastic rounding (docs/format/int4.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.lossy import LossyTiledCodec, float_kind
from cswap.codecs.tiled import TileFunctions
from cswap_kernels.int4 import int4_decode_cpu, int4_encode_cpu
from cswap_kernels.tiles import tile_decoder, tile_encoder

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType

_U32: Final = 0xFFFFFFFF
_U64: Final = 0xFFFFFFFFFFFFFFFF


class Int4(LossyTiledCodec):
    """Error: a step of the group, (max - min) / 14, but right on average over keys.

    Except in groups without negative values: there what is not 0 becomes a step, not 0.

    The bytes are a function of the tensor and of the key: its seed modulo 2**64, its tensor_id and
    step modulo 2**32.
    """

    name = "int4"

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`."""
        return TileFunctions(
            tile_encoder(int4_encode_cpu, dtype.word), tile_decoder(int4_decode_cpu, dtype.word)
        )

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[3] u64: how to read the words, seed, and tensor and step."""
        stream = (key.tensor_id & _U32) | (key.step & _U32) << 32
        return np.array([float_kind(dtype), key.seed & _U64, stream], np.uint64)
