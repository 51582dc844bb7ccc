"""Encodes and decodes in the thread that calls, for devices whose memory is the host's.

Tensors with a handle pass through host_executor.py; those without one (replay/) come here.
"""

from __future__ import annotations

import ctypes
import time
from collections import deque
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

import torch

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import copy_bytes
from cswap.devices.base import FLAT, without_memory
from cswap.engine.transfer.checked_way import CheckedByAddress
from cswap.engine.transfer.stored import INDICES
from cswap.recent import Recent

if TYPE_CHECKING:
    from cswap.codecs.base import ByAddress, Codec, EncodeKey
    from cswap.engine.transfer.notes import TripNotes
    from cswap.engine.transfer.resources import Resources
    from cswap.pool import Loan

MOST_KINDS: Final = 1 << 12
"""Kinds of tensors whose way by address is remembered."""

MOST_KEPT: Final = 256 << 10
"""Bytes of scratch memory that each thread which encodes may keep from one tensor to the next."""

_now = time.perf_counter


Encoding: TypeAlias = "tuple[Loan, int, float, ByAddress | None]"
"""An encoding in the host store's memory: the loan, the bytes of it that are in use, the seconds
that the encode took, and the way by which it is decoded (None: by the codec). A plain tuple, since
to make an object takes as long as to copy 10 KiB."""


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
        self._known: Recent[tuple[str, torch.dtype, int], tuple[Codec, ByAddress | None]]
        self._known = Recent(MOST_KINDS)
        self._idle: deque[torch.Tensor] = deque()  # memory for encoders; several threads may encode

    def by_address(self, codec: Codec, dtype: torch.dtype, nbytes: int) -> ByAddress | None:
        """See `Codec.by_address`.

        Payloads of indices are compared on the way back.

        Args:
            codec: the codec.
            dtype: of the tensors.
            nbytes: of a tensor.
        """
        known = self._known.get((codec.name, dtype, nbytes))
        if known is not None and known[0] is codec:  # else another one was registered
            return known[1]
        return self._find(codec, dtype, nbytes)

    def _find(self, codec: Codec, dtype: torch.dtype, nbytes: int) -> ByAddress | None:
        found = None
        try:
            found = codec.by_address(dtype, nbytes, self._stream.threads)
            if found is not None and dtype in INDICES:
                found = CheckedByAddress(codec.name, found)
        except Exception as error:  # a codec of another package may raise anything
            self._counters.fall_back(f"{codec.name}:by_address", error)
        self._known[codec.name, dtype, nbytes] = codec, found
        return found

    def encode_at(self, address: int, way: ByAddress) -> Encoding | None:
        """Encode the tensor at an address by a lossless codec.

        Args:
            address: of the tensor, a multiple of any word's size.
            way: of `by_address` for its codec, dtype and bytes.

        Returns:
            None: the store has no room, or the codec gave an impossible size.
        """
        start_s, bound = _now(), way.bound
        scratch = self.scratch(bound)
        source = scratch.data_ptr()
        nbytes = way.encode(address, source)
        if not 0 <= nbytes <= bound:  # a copy would read memory that is not the encoding's
            why = f"it gave {nbytes} bytes; {bound} are its bound"
            self._counters.fall_back("encode by address", why)
            return None
        loan = self.host.take(nbytes)
        if loan is not None:
            ctypes.memmove(loan.buffer.data_ptr(), source, nbytes)
        self.keep(scratch)
        return None if loan is None else (loan, nbytes, _now() - start_s, way)

    def encode(self, x: torch.Tensor, codec: Codec, key: EncodeKey) -> Encoding | None:
        """Encode a tensor; None: the store has no room, or nobody would compare the payload.

        Args:
            x: [n] flat.
            codec: to encode with.
            key: see `Codec.encode_flat`.
        """
        if x.dtype in INDICES:
            return None
        start_s = _now()
        scratch, nbytes = self.encoded(x, codec, key)
        loan = self.host.take(nbytes)
        if loan is not None:
            copy_bytes(loan.buffer, scratch, nbytes)
        self.keep(scratch)
        way = self.by_address(codec, x.dtype, x.nbytes)
        return None if loan is None else (loan, nbytes, _now() - start_s, way)

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
            CorruptEncodingError: the codec cannot decode it.
            MemoryError: no memory to decode into.
            UnsupportedError: a mode makes tensors without memory.
        """
        start_s = _now()
        loan, used, encode_s, way = owner.encoding
        recipe, dtype = owner.recipe, owner.dtype
        # In its own layout: a view is one more tensor to make, and to let go.
        sizes: tuple[int, ...] = recipe.sizes
        strides = recipe.strides
        as_it_was = recipe.contiguous and way is not None
        if not as_it_was:
            sizes, strides = (owner.nbytes // dtype.itemsize,), FLAT
        try:
            out = self._device.allocate(sizes, strides, dtype=dtype)
        except RuntimeError as error:  # torch's, for a CPU's memory as well
            raise MemoryError(f"swap-in of {owner.nbytes} bytes: {error}") from None
        if type(out) is not torch.Tensor:
            raise without_memory(out)
        if way is None:
            owner.codec.decode_flat(loan.buffer[:used], out, stream=self._stream)
        else:
            way.decode(loan.buffer.data_ptr(), used, out.data_ptr())
        decode_s = _now() - start_s
        self._counters.decodes.append((owner.codec.name, decode_s))
        notes = owner.notes
        if notes is not None:
            owner.notes = None
            notes.note_round_trip(owner.codec.name, encode_s + decode_s)
        return out if as_it_was else out.as_strided(recipe.sizes, recipe.strides)

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
