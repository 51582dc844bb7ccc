"""Whole tensors over a link and back, as they are and without a handle (see short_way.py).

The order is that of Note [the host is ahead] in link_executor.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, cast

from cswap.engine.transfer.ahead import Ahead
from cswap.errors import to_raise

if TYPE_CHECKING:
    import torch

    from cswap.devices.base import Event
    from cswap.engine.transfer.host_copy import CopyOwner, HostCopy
    from cswap.engine.transfer.leaving import Leaving
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.staging import Staging


class LinkCopies:
    """Copies tensors to the host and back."""

    def __init__(self, resources: Resources, leaving: Leaving, staging: Staging) -> None:
        """Args: resources: of the device; leaving: sources under way; staging: their bound."""
        self._resources, self._leaving, self._staging = resources, leaving, staging
        self._device, self._host = resources.device, resources.host
        self._lock, self._counters = resources.lock, resources.counters

    def send(self, copy: HostCopy, x: torch.Tensor) -> bool:
        """Submit the copy of a tensor to the host; whether there is room, and it was issued.

        Args:
            copy: its owner holds x as its ``source``.
            x: [n] flat, the whole of its storage.
        """
        device, nbytes = self._device, x.nbytes
        device.pump()
        self._staging.sends(nbytes)
        loan = self._host.take(nbytes)
        if loan is None:
            return False
        buffer, issued = loan.buffer, device.now()
        # Loans of host memory end with events of this device.
        waits = (issued,) if loan.after is None else (issued, cast("Event", loan.after))
        try:
            copy.out = out = device.copy(buffer, x, nbytes, role="d2h", after=waits)
            if out.error is not None:
                self._host.give_back(buffer, out)
                return False
            copy.buffer, copy.held_bytes = buffer, nbytes
            self._counters.copied(nbytes, buffer.numel())
            self._leaving.add_copy(copy, x, out, issued, self._staging.out_bytes)
        except BaseException:
            device.drain()  # the copy may be reading memory that nobody holds from here on
            raise
        return True

    def memory(self, owner: CopyOwner) -> torch.Tensor:
        """The tensor's memory, [n] flat: its own if still held, else a copy of the host's.

        Computation that this thread issues from here on may read it.

        Raises:
            CorruptEncodingError: values that were computed before may be wrong.
            MemoryError: no memory to copy into.
        """
        self._resources.raise_damage()
        copy, device, first = owner.copy, self._device, not owner.uses
        source = owner.source
        if source is not None:
            if first:
                self._counters.stay("wanted_early", owner.nbytes)
            device.share(source)
            return source
        try:
            ahead = None if copy.ahead is None else self._take_ahead(copy)
            self._counters.fetched(hit=ahead is not None, first=first)
            if ahead is None:
                ahead = self._bring(owner)
            device.join(ahead.decoded)
        except BaseException:
            device.drain()  # a side stream may be writing memory that nobody holds now
            raise
        if ahead.decoded.error is not None:
            raise to_raise(ahead.decoded.error)
        device.share(ahead.result)
        return ahead.result

    def prefetch(self, owner: CopyOwner) -> bool:
        """Start to bring a tensor back, beside the computation; whether it was on the host only."""
        copy = owner.copy
        with self._lock:
            if owner.source is not None or copy.ahead is not None or copy.fetching:
                return False
            copy.fetching = True
        try:
            ahead = self._bring(owner)
            with self._lock:
                copy.ahead = ahead
                copy.held_bytes += copy.raw_nbytes
        except MemoryError as error:  # unpack will try again, and says so if it must
            self._counters.fall_back("prefetch", error)
            return False
        except BaseException:
            self._device.drain()
            raise
        finally:
            copy.fetching = False
        self._counters.hold(device=copy.raw_nbytes)
        return True

    def drop_ahead(self, copy: HostCopy) -> None:
        """Let go of the memory that the tensor was copied into ahead of its use."""
        try:
            ahead = self._take_ahead(copy)
            if ahead is not None:
                self._device.join(ahead.decoded, ahead.issued)
        except BaseException:
            self._device.drain()  # see `memory`
            raise

    def release(self, copy: HostCopy) -> None:
        """Nobody can ask for the tensor any more: free everything. Twice is once."""
        if copy.ahead is not None:
            self.drop_ahead(copy)
        with self._lock:
            buffer, copy.buffer = copy.buffer, None
            held, copy.held_bytes = copy.held_bytes, 0
        if buffer is not None:
            self._host.give_back(buffer, copy.back or copy.out)
            self._counters.hold(device=-held, host=-buffer.numel())

    def _take_ahead(self, copy: HostCopy) -> Ahead | None:
        with self._lock:
            ahead, copy.ahead = copy.ahead, None
            if ahead is not None:
                copy.held_bytes -= copy.raw_nbytes
        if ahead is not None:
            self._counters.hold(device=-copy.raw_nbytes)
        return ahead

    def _bring(self, owner: CopyOwner) -> Ahead:
        device, copy, nbytes = self._device, owner.copy, owner.nbytes
        buffer, out = copy.buffer, copy.out
        assert buffer is not None  # its owner is alive
        assert out is not None
        try:
            result = device.allocate(owner.dtype, nbytes // owner.dtype.itemsize)
        except RuntimeError as error:
            raise MemoryError(f"swap-in of {nbytes} bytes: {error}") from None
        issued = device.now()
        copy.back = back = device.copy(result, buffer, nbytes, role="h2d", after=(out, issued))
        return Ahead(result, back, issued)
