"""``raw``: the unchanged bytes, so that a move without encoding is a codec, too."""

from __future__ import annotations

import ctypes
from math import inf
from typing import TYPE_CHECKING, Final

from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream, is_flat_of
from cswap.codecs.layout import copy_bytes
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap.errors import CorruptEncodingError
from cswap.schema.tensor import DTYPES, dtype_name

if TYPE_CHECKING:
    import torch


class Raw(Codec):
    """A copy. See docs/format.md, section "raw"."""

    name = "raw"
    lossless = True
    max_ratio = 1
    verbatim = True
    traits = CodecTraits(
        predicted_ratio=lambda _: 1.0,
        rates={
            "cpu": CodecRate(24e9, 17e9),
            "cuda": CodecRate(inf, inf),
        },  # the copy engine does it
    )

    def supports(self, dtype: torch.dtype, device: str = "cpu") -> bool:
        """Every dtype, everywhere."""
        return dtype_name(dtype) in DTYPES

    def bound(self, dtype: torch.dtype, numel: int) -> int:
        """Exactly the raw bytes."""
        return numel * dtype.itemsize

    def encode_flat(
        self,
        x: torch.Tensor,
        out: torch.Tensor,
        *,
        key: EncodeKey,
        stream: Stream | None,
    ) -> int | LateSize:
        """See `Codec.encode_flat`."""
        copy_bytes(out, x, x.nbytes)
        return x.nbytes

    def decode_flat(
        self,
        payload: torch.Tensor,
        out: torch.Tensor,
        *,
        stream: Stream | None,
    ) -> None:
        """See `Codec.decode_flat`."""
        if payload.numel() != out.nbytes:
            raise _other_size(payload.numel(), out.nbytes)
        copy_bytes(out, payload, out.nbytes)

    def by_address(self, dtype: torch.dtype, nbytes: int, threads: int) -> CopyByAddress | None:
        """See `Codec.by_address`."""
        return CopyByAddress(nbytes) if is_flat_of(self, Raw) else None


class CopyByAddress:
    """Copies tensors of one size, by the addresses of a CPU's memory.

    Attributes:
        bound: bytes of a tensor.
        is_exact: always.
    """

    is_exact: Final = True

    def __init__(self, nbytes: int) -> None:
        """Args: nbytes: of a tensor."""
        self.bound = nbytes

    def encode(self, source: int, target: int) -> int:
        """See `ByAddress.encode`."""
        ctypes.memmove(target, source, self.bound)
        return self.bound

    def decode(self, payload: int, nbytes: int, target: int) -> None:
        """See `ByAddress.decode`."""
        if nbytes != self.bound:
            raise _other_size(nbytes, self.bound)
        ctypes.memmove(target, payload, nbytes)


def _other_size(nbytes: int, expected: int) -> CorruptEncodingError:
    return CorruptEncodingError(f"raw encoding of {nbytes} bytes, {expected} expected.")
