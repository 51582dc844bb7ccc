"""Encodes and decodes in the thread that calls, without a handle (see short_way.py).

For devices whose memory is the host's.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import copy_bytes

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec, EncodeKey
    from cswap.engine.transfer.resources import Resources


class Encoding(NamedTuple):
    """An encoding in the host store's memory.

    Attributes:
        buffer: of the store.
        nbytes: of it that are in use.
        seconds: that the encode took.
    """

    buffer: torch.Tensor
    nbytes: int
    seconds: float


class InLine:
    """Encodes whole tensors into a device's host store, and decodes them."""

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._device, self._counters = resources.device, resources.counters
        self.host, self.seed = resources.host, resources.seed
        self._stream = resources.device.in_line

    def encode(self, x: torch.Tensor, codec: Codec, key: EncodeKey) -> Encoding | None:
        """Encode a tensor; None: the store has no room.

        Args:
            x: [n] flat; contiguous in any order of dimensions if the codec is verbatim.
            codec: to encode with.
            key: see `Codec.encode_flat`.
        """
        start_s = time.perf_counter()
        if codec.verbatim:
            nbytes, payload = x.nbytes, x
        else:
            bound = checked_bound(codec, x.dtype, x.numel())
            payload = self._device.scratch(bound, "codec")
            size = codec.encode_flat(x, payload, key=key, stream=self._stream)
            nbytes = checked_size(codec, size, bound)
        loan = self.host.take(nbytes)
        if loan is None:
            return None
        copy_bytes(loan.buffer, payload, nbytes)
        if payload is not x:
            self._device.give_back(payload)
        return Encoding(loan.buffer, nbytes, time.perf_counter() - start_s)

    def decode(
        self, payload: torch.Tensor, codec: Codec, dtype: torch.dtype, nbytes: int
    ) -> tuple[torch.Tensor, float]:
        """The elements, [n] flat, and the seconds that this took.

        Args:
            payload: [encoded bytes] uint8.
            codec: that made it.
            dtype: of the elements.
            nbytes: of the elements.

        Raises:
            CorruptEncodingError: the codec cannot decode it.
            MemoryError: no memory to decode into.
        """
        start_s = time.perf_counter()
        try:
            out = self._device.allocate(dtype, nbytes // dtype.itemsize)
        except RuntimeError as error:  # torch's, for a CPU's memory as well
            raise MemoryError(f"swap-in of {nbytes} bytes: {error}") from None
        codec.decode_flat(payload, out, stream=self._stream)
        return out, time.perf_counter() - start_s
