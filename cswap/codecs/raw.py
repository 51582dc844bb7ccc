"""``raw``: the unchanged bytes, so that a move without encoding is a codec, too."""

from __future__ import annotations

from math import inf
from typing import TYPE_CHECKING

from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream
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
            raise CorruptEncodingError(
                f"raw encoding of {payload.numel()} bytes, {out.nbytes} expected."
            )
        copy_bytes(out, payload, out.nbytes)
