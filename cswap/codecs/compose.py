"""``zvc+X``: zeros are left out, the codec X encodes the rest (docs/format/compose.md)."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.codecs.tiled import TiledCodec, TileFunctions
from cswap.codecs.zvc import Zvc
from cswap.errors import ConfigError
from cswap_kernels.tiles import tile_decoder, tile_encoder
from cswap_kernels.zvc_plus import zvc_plus_decode_cpu, zvc_plus_encode_cpu

if TYPE_CHECKING:
    import torch
    from numpy.typing import NDArray

    from cswap.codecs.base import Codec, EncodeKey
    from cswap.schema.tensor import DType

SECOND: Final = (
    "bf16",
    "bitpack",
    "expk",
    "fp16",
    "fp8",
    "int4",
    "int8",
    "mxfp8",
    "rle",
)
"""Built-in codecs that may follow ``zvc+``; so may any `TiledCodec` of others."""


class ZvcPlus(TiledCodec):
    """Zeros exact, whatever X does to the rest; lossless if X is, and for the dtypes that X takes.

    Args:
        second: X. Where it would not shrink a tile's survivors, these are stored as they are.
    """

    def __init__(self, second: TiledCodec) -> None:
        self.name = f"zvc+{second.name}"
        self.lossless = second.lossless
        self._second = second
        # Machine code that the kernels call by address; held as long as this codec.
        self._held: dict[str, TileFunctions] = {}

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """What X takes."""
        return self._second.supports(dtype) and self.runs_on(device, dtype)

    def cuda_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """X's own."""
        return self._second.cuda_args(dtype, key)

    @property
    def cuda_format(self) -> str:
        """Of the composition, whatever the parameters of X."""
        return f"zvc+{self._second.cuda_format}"

    def tile_functions(self, dtype: DType) -> TileFunctions:
        """See `TiledCodec.tile_functions`; the same for every X."""
        return TileFunctions(
            tile_encoder(zvc_plus_encode_cpu, dtype.word),
            tile_decoder(zvc_plus_decode_cpu, dtype.word),
        )

    def tile_args(self, dtype: DType, key: EncodeKey) -> NDArray[np.uint64]:
        """[2 + k] u64: addresses of X's tile functions, then X's own."""
        x = self._held.setdefault(dtype.name, self._second.tile_functions(dtype))
        addresses = [x.encode.__wrapper_address__(), x.decode.__wrapper_address__()]
        own = self._second.tile_args(dtype, key)
        return np.concatenate((np.array(addresses, np.uint64), own))


def compose(first: Codec, second: Codec) -> Codec:
    """The codec ``first+second``.

    Raises:
        ConfigError: there is no such composition.
    """
    if not isinstance(first, Zvc):
        reason = f"{first.name!r} leaves nothing to a second codec; only 'zvc' does"
    elif not isinstance(second, TiledCodec):
        reason = f"{second.name!r} does not encode by tiles"
    elif isinstance(second, ZvcPlus) or second.name in ("zvc", "csr"):
        reason = f"{second.name!r} looks for zeros, of which 'zvc' leaves none"
    else:
        return ZvcPlus(second)
    known = ", ".join(f"zvc+{x}" for x in SECOND)
    raise ConfigError(f"codec='{first.name}+{second.name}': {reason}. Use one of {known}.")
