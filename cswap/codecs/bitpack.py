"""``bitpack``: integers and bools in the fewest bits per tile (docs/format/bitpack.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.codecs.tiled import TiledCodec
from cswap.codecs.traits import CodecRate, CodecTraits, word_bits
from cswap.schema.tensor import DTYPES, dtype_name
from cswap_kernels.bitpack import bitpack_decode_cpu, bitpack_encode_cpu

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import EncodeKey
    from cswap.schema.tensor import DType, TensorProfile


def _predicted_ratio(profile: TensorProfile) -> float:
    if DTYPES[profile.dtype].kind == "bool":
        return 4096 / (512 + 12)  # bytes of 4096 bools: a bit each, and the table of the tile
    word = word_bits(profile)
    return word / (word if profile.int_bits is None else min(word, profile.int_bits + 0.25))


class Bitpack(TiledCodec):
    """Bools take one bit; integers take the bits of their range within a tile."""

    name = "bitpack"
    kernels = bitpack_encode_cpu, bitpack_decode_cpu
    lossless = True
    traits = CodecTraits(
        predicted_ratio=_predicted_ratio,
        rates={"cpu": CodecRate(23e9, 14e9), "cuda": CodecRate(1400e9, 1400e9)},
    )

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Integers and bools."""
        d = DTYPES.get(dtype_name(dtype))
        takes = d is not None and d.kind in ("int", "uint", "bool")
        return takes and self.runs_on(device, dtype)

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[1] u64: the sign bit, which is flipped to get an unsigned order; 0 if unsigned."""
        sign = 1 << (8 * dtype.word - 1) if dtype.kind == "int" else 0
        return np.array([sign], np.uint64)
