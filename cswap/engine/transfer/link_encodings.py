"""Whole tensors that are encoded on their way over a link, without a handle (see short_way.py).

The order is that of Note [the host is ahead] in link_executor.py.
"""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import first_bytes
from cswap.engine.transfer.resources import Patience
from cswap.errors import CorruptEncodingError, InternalError, to_raise, without_frames
from cswap.stats.counters import SAVED

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec, EncodeKey, LateSize, Stream
    from cswap.devices.base import Event, Role
    from cswap.engine.transfer.host_copy import HostCopy
    from cswap.engine.transfer.leaving import Leaving
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.staging import Staging
    from cswap.engine.transfer.unsized import Unsized


class LinkEncodings:
    """Encodes tensors on the device and copies the encodings to the host; and back."""

    def __init__(
        self, resources: Resources, leaving: Leaving, staging: Staging, unsized: Unsized
    ) -> None:
        """Args: resources: of the device; leaving: sources under way; the others: their bounds."""
        self._leaving, self._staging, self._unsized = leaving, staging, unsized
        self._device, self._host = resources.device, resources.host
        self._lock, self._counters = resources.lock, resources.counters

    def send(self, copy: HostCopy, x: torch.Tensor, codec: Codec, key: EncodeKey) -> bool:
        """Submit the encode of a tensor; whether it was issued.

        Args:
            copy: its owner holds x as its ``source``.
            x: [n] flat, the whole of its storage.
            codec: must support the dtype.
            key: of the encode.
        """
        device = self._device
        bound = checked_bound(codec, x.dtype, x.numel())
        self._unsized.make_room(bound)
        try:
            scratch = device.scratch(bound, "codec")
        except MemoryError:
            return False
        issued, sizes = device.now(), []  # type: tuple[Event, list[int | LateSize]]

        def job(stream: Stream) -> None:
            sizes.append(codec.encode_flat(x, scratch, key=key, stream=stream))

        encoded = device.submit(job, role="codec", after=(issued,))
        if encoded.error is not None:  # the whole way meets it again, and counts it
            device.give_back(scratch, encoded)
            return False
        copy.codec, copy.encoded, copy.safe = codec, encoded, False
        copy.held_bytes = x.nbytes
        self._counters.moves.append((x.nbytes, 0, *SAVED))
        self._leaving.add_copy(copy, x, encoded, issued, self._staging.out_bytes)
        known = partial(self._size_known, copy, [scratch], sizes, encoded, bound)
        if isinstance(sizes[0], int):
            known()
            device.when(encoded, self._leaving.go_on)
        else:
            self._unsized.add(encoded)
            device.when(encoded, known)
        return True

    def _size_known(
        self,
        copy: HostCopy,
        lent: list[torch.Tensor],
        sizes: list[int | LateSize],
        encoded: Event,
        bound: int,
    ) -> None:
        # lent: the scratch that it was encoded into, until that is given back. After an interrupt
        # this comes once more.
        self._unsized.discard(encoded)
        codec, free = copy.codec, encoded  # type: Codec | None, Event | None
        assert codec is not None  # set before
        try:
            nbytes = checked_size(codec, sizes[0], bound)
            if copy.is_stored:
                free = None if copy.kept is not None else copy.out
            elif self._is_wanted(copy) and lent:
                free = self._store(copy, codec, lent[0], nbytes)
        except Exception as error:
            self._fails(copy, codec, error)
        if free is not None and lent:
            try:
                self._device.give_back(lent.pop(), free)  # once, whatever comes in between
            except BaseException:
                self._device.drain()
                raise
        self._leaving.go_on()

    @staticmethod
    def _is_wanted(copy: HostCopy) -> bool:
        return not copy.released and copy() is not None

    def _store(
        self, copy: HostCopy, codec: Codec, scratch: torch.Tensor, nbytes: int
    ) -> Event | None:
        # The event after which the scratch is free; None: it is kept.
        encoded, raw_nbytes = copy.encoded, copy.raw_nbytes
        assert encoded is not None  # set before
        loan = self._host.take(nbytes)
        if loan is None:
            with self._lock:
                wanted = self._is_wanted(copy)
                if wanted:
                    copy.nbytes, copy.out, copy.safe = nbytes, encoded, True
                    copy.held_bytes += nbytes
                    copy.kept = scratch  # last: `is_stored` promises the others
            if not wanted:
                return encoded
            self._counters.fall_back("host_limit", "no memory", "encodings stay on the device")
            self._counters.moves.append((nbytes, 0, 0, codec.name, raw_nbytes, nbytes, 0.0))
            return None
        # Loans of host memory end with events of this device. A cast would be a call.
        waits: tuple[Any, ...] = (encoded,) if loan.after is None else (encoded, loan.after)
        buffer = loan.buffer
        try:
            out = self._device.copy(buffer, scratch, nbytes, role="d2h", after=waits)
            with self._lock:
                wanted = out.error is None and not copy.released and copy() is not None
                if wanted:
                    copy.nbytes, copy.out, copy.safe = nbytes, out, True
                    copy.buffer = buffer  # last: `is_stored` promises the others
        except BaseException:
            self._device.drain()  # the copy may be writing memory that nobody holds from here on
            raise
        if not wanted:
            self._host.give_back(buffer, out)
            if out.error is not None:
                raise to_raise(out.error)
            return out
        self._counters.moves.append((0, buffer.numel(), 0, codec.name, raw_nbytes, nbytes, 0.0))
        notes = copy.notes
        if notes is not None and notes.learns:
            notes.note_encoded(codec.name, raw_nbytes, nbytes)
        return out

    def _fails(self, copy: HostCopy, codec: Codec, error: Exception) -> None:
        with self._lock:
            owner = copy()
            stays = owner is not None and owner.source is not None
            if stays:  # in its own memory
                copy.stays = True
            else:
                text = f"codec {codec.name!r}: {without_frames(error)}"
                copy.error = CorruptEncodingError(text)
        if stays:
            self._counters.fall_back(f"{codec.name}:encode", without_frames(error))

    def await_size(self, copy: HostCopy) -> None:
        """Wait until it is known where the encoding is, and how long.

        Raises:
            CorruptEncodingError: its encode has failed, and the tensor's own memory is gone.
        """
        patience: Patience | None = None
        while not copy.is_stored:
            if copy.error is not None:
                raise to_raise(copy.error)
            if copy.encoded is None:
                raise InternalError("an encoding is nowhere")
            self._device.wait(copy.encoded)
            self._device.pump()
            patience = patience or Patience()
            patience.pause("encoded")

    def decode(self, copy: HostCopy, result: torch.Tensor, role: Role, issued: Event) -> Event:
        """Submit the copy and the decode of an encoding whose size is known.

        Args:
            copy: of the tensor.
            result: [n] flat memory of the compute stream.
            role: of the decode: "compute", or "codec" if it is ahead of its use.
            issued: the moment on the compute stream at which ``result`` was allocated.

        Returns:
            An event after which ``result`` holds the values.

        Raises:
            MemoryError: no scratch memory.
        """
        device, codec, nbytes = self._device, copy.codec, copy.nbytes
        assert codec is not None  # set by `send`
        assert copy.out is not None  # its size is known
        if copy.kept is not None:
            payload, ready, scratch = first_bytes(copy.kept, nbytes), copy.out, None
        else:
            buffer = copy.buffer
            assert buffer is not None  # the owner is alive
            scratch = device.scratch(max(nbytes, 1), "h2d")
            payload = first_bytes(scratch, nbytes)
            ready = device.copy(scratch, buffer, nbytes, role="h2d", after=(copy.out,))
            copy.is_read_until(ready, device, self._lock)
            if ready.error is not None:
                device.give_back(scratch, ready)
                raise to_raise(ready.error)
        decoded = device.submit(
            lambda stream: codec.decode_flat(payload, result, stream=stream),
            role=role,
            after=(ready, issued),
        )
        if scratch is None:
            copy.is_read_until(decoded, device, self._lock)
        else:
            device.give_back(scratch, decoded)
        return decoded
