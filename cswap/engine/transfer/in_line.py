"""Encodes and decodes in the thread that calls, for devices whose memory is the host's.

Tensors with a handle pass through host_executor.py; those without one (replay/) come here.
"""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import torch

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import copy_bytes
from cswap.devices.base import FLAT, without_memory
from cswap.engine.transfer.resources import DAMAGED, checksum
from cswap.engine.transfer.stored import INDICES
from cswap.errors import CorruptEncodingError

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, EncodeKey
    from cswap.engine.transfer.notes import TripNotes
    from cswap.engine.transfer.resources import Resources
    from cswap.pool import Loan

MOST_KEPT: Final = 256 << 10
"""Bytes of scratch memory that each thread which encodes may keep from one tensor to the next."""

_now = time.perf_counter


Encoding: TypeAlias = "tuple[Loan, int, float, int | None]"
"""An encoding in the host store's memory: the loan, the bytes of it that are in use, the seconds
that the encode took, and a CRC-32 of these bytes (None: of other tensors than indices)."""


class Shape(Protocol):
    """Of a tensor.

    Attributes:
        sizes: its sizes.
        strides: its strides.
        contiguous: whether a new tensor of these sizes has the same strides.
    """

    sizes: torch.Size
    strides: tuple[int, ...]
    contiguous: bool


class EncodingOwner(Protocol):
    """Stands for an encoded tensor in autograd's graph.

    Attributes:
        recipe: the tensor's shape.
        dtype: of the tensor.
        nbytes: of the tensor.
        codec: that encoded it.
        encoding: of the tensor.
        notes: to be told how long the first round trip took; None: nobody asks.
    """

    @property
    def recipe(self) -> Shape:
        """See above."""
        ...

    dtype: torch.dtype
    nbytes: int
    codec: Codec
    encoding: Encoding
    notes: TripNotes | None


class InLine:
    """Encodes whole tensors into a device's host store, and decodes them."""

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._device, self._counters = resources.on_host, resources.counters
        self.host, self.seed = resources.host, resources.seed
        self._stream = resources.on_host.in_line
        self._idle: deque[torch.Tensor] = deque()  # memory for encoders; several threads may encode

    def encode(self, x: torch.Tensor, codec: Codec, key: EncodeKey) -> Encoding | None:
        """Encode a tensor; None: the store has no room.

        Args:
            x: [n] flat.
            codec: to encode with.
            key: see `Codec.encode_flat`.
        """
        start_s = _now()
        scratch, nbytes = self.encoded(x, codec, key)
        loan = self.host.take(nbytes)
        if loan is not None:
            copy_bytes(loan.buffer, scratch, nbytes)
        self.keep(scratch)
        if loan is None:
            return None
        check = checksum(loan.buffer[:nbytes]) if x.dtype in INDICES else None
        return loan, nbytes, _now() - start_s, check

    def encoded(self, x: torch.Tensor, codec: Codec, key: EncodeKey) -> tuple[torch.Tensor, int]:
        """The encoding of a tensor in scratch memory, to be given to `keep`; and its bytes.

        Args:
            x: [n] flat.
            codec: to encode with.
            key: see `Codec.encode_flat`.
        """
        bound = checked_bound(codec, x.dtype, x.numel())
        scratch = self.scratch(bound)
        size = codec.encode_flat(x, scratch, key=key, stream=self._stream)
        return scratch, checked_size(codec, size, bound)

    def decode(self, owner: EncodingOwner) -> torch.Tensor:
        """The values of an encoded tensor, in its layout.

        Raises:
            CorruptEncodingError: the codec cannot decode it, or a bit of indices' has changed.
            MemoryError: no memory to decode into.
            UnsupportedError: a mode makes tensors without memory.
        """
        start_s = _now()
        loan, used, encode_s, check = owner.encoding
        recipe, dtype = owner.recipe, owner.dtype
        try:
            out = self._device.allocate((owner.nbytes // dtype.itemsize,), FLAT, dtype=dtype)
        except RuntimeError as error:  # torch's, for a CPU's memory as well
            raise MemoryError(f"swap-in of {owner.nbytes} bytes: {error}") from None
        if type(out) is not torch.Tensor:
            raise without_memory(out)
        payload = loan.buffer[:used]
        if check is not None and checksum(payload) != check:
            raise CorruptEncodingError(DAMAGED.format(owner.codec.name, used))
        owner.codec.decode_flat(payload, out, stream=self._stream)
        decode_s = _now() - start_s
        self._counters.decodes.append((owner.codec.name, decode_s))
        notes = owner.notes
        if notes is not None:
            owner.notes = None
            notes.note_round_trip(owner.codec.name, encode_s + decode_s)
        return out.as_strided(recipe.sizes, recipe.strides)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """[>= nbytes] uint8 to encode into; ends with `keep`.

        A small one is kept from tensor to tensor. A large one is the model's again, so that nobody
        holds it until backward begins.

        Raises:
            MemoryError: there is none left.
        """
        try:
            kept = self._idle.pop() if nbytes <= MOST_KEPT else None
        except IndexError:
            kept = None
        if kept is not None and kept.numel() >= nbytes:
            return kept
        return self._device.host_memory(nbytes)

    def keep(self, scratch: torch.Tensor) -> None:
        """Keep memory that `scratch` gave for the next tensor, if it is small."""
        if scratch.numel() <= MOST_KEPT:
            self._idle.append(scratch)

    def trim(self) -> None:
        """Keep no encoders' memory."""
        self._idle.clear()

    @property
    def scratch_bytes(self) -> int:
        """Bytes that are kept for encoders."""
        return sum(x.numel() for x in list(self._idle))
