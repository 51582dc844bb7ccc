"""Whole tensors over a link and back, without a handle (see short_way.py).

The order is that of Note [the host is ahead] in link_executor.py.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from cswap.devices.base import FLAT, without_memory
from cswap.engine.transfer.ahead import Ahead
from cswap.engine.transfer.link_encodings import LinkEncodings
from cswap.errors import CorruptEncodingError, to_raise
from cswap.stats.counters import NO_TENSOR

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, EncodeKey
    from cswap.devices.base import Role
    from cswap.engine.transfer.host_copy import CopyOwner, HostCopy
    from cswap.engine.transfer.leaving import Leaving
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.staging import Staging
    from cswap.engine.transfer.unsized import Unsized


class LinkCopies:
    """Brings tensors to the host and back, as they are or encoded."""

    def __init__(
        self, resources: Resources, leaving: Leaving, staging: Staging, unsized: Unsized
    ) -> None:
        """Args: resources: of the device; leaving: sources under way; the others: their bounds."""
        self._resources, self._leaving, self._staging = resources, leaving, staging
        self._device, self._host = resources.device, resources.host
        self._lock, self._counters = resources.lock, resources.counters
        self._encodings = LinkEncodings(resources, leaving, staging, unsized)

    def send(self, copy: HostCopy, x: torch.Tensor, codec: Codec, key: EncodeKey) -> bool:
        """Submit what brings a tensor to the host; whether there is room, and it was issued.

        Args:
            copy: its owner holds x as its ``source``.
            x: contiguous, the whole of its storage; [n] flat if it is to be encoded.
            codec: that encodes it.
            key: of the encode.
        """
        device, nbytes = self._device, x.nbytes
        device.pump()
        self._staging.sends(nbytes)
        if not codec.verbatim:
            try:
                return self._encodings.send(copy, x, codec, key)
            except Exception:  # the whole way meets it again, and counts it
                device.drain()  # see below
                return False
            except BaseException:
                device.drain()
                raise
        loan = self._host.take(nbytes)
        if loan is None:
            return False
        buffer, issued = loan.buffer, device.now()
        # Loans of host memory end with events of this device. A cast would be a call.
        waits: tuple[Any, ...] = (issued,) if loan.after is None else (issued, loan.after)
        try:
            copy.out = out = device.copy(buffer, x, nbytes, role="d2h", after=waits)
            if out.error is not None:
                self._host.give_back(buffer, out)
                return False
            copy.buffer, copy.held_bytes = buffer, nbytes
            self._counters.moves.append(
                (nbytes, buffer.numel(), 1, codec.name, nbytes, nbytes, 0.0)
            )
            self._leaving.add_copy(copy, x, out, issued, self._staging.out_bytes)
        except BaseException:
            device.drain()  # the copy may be reading memory that nobody holds from here on
            raise
        return True

    def memory(self, owner: CopyOwner) -> torch.Tensor:
        """The tensor's memory: its own if still held, else a copy of the host's.

        It is in the tensor's layout, or [n] flat.

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
            if first:
                self._counters.hits.append(ahead is not None)
            if ahead is None:
                ahead = self._bring(owner, "compute")
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
            ahead = self._bring(owner, "codec")
            with self._lock:
                copy.ahead = ahead
                copy.held_bytes += copy.raw_nbytes
        except MemoryError as error:  # unpack will try again, and says so if it must
            self._counters.fall_back("prefetch", error)
            return False
        except CorruptEncodingError:  # unpack meets it again, and raises
            return False
        except BaseException:
            self._device.drain()
            raise
        finally:
            copy.fetching = False
        self._counters.moves.append((copy.raw_nbytes, 0, *NO_TENSOR))
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
            copy.released = True
            buffer, copy.buffer = copy.buffer, None
            kept, copy.kept = copy.kept, None
            held, copy.held_bytes = copy.held_bytes, 0
        after = copy.back or copy.out
        if buffer is not None:
            self._host.give_back(buffer, after)
        if kept is not None:
            self._device.give_back(kept, after)
        if held or buffer is not None:
            host_bytes = 0 if buffer is None else buffer.numel()
            self._counters.moves.append((-held, -host_bytes, *NO_TENSOR))

    def _take_ahead(self, copy: HostCopy) -> Ahead | None:
        with self._lock:
            ahead, copy.ahead = copy.ahead, None
            if ahead is not None:
                copy.held_bytes -= copy.raw_nbytes
        if ahead is not None:
            self._counters.moves.append((-copy.raw_nbytes, 0, *NO_TENSOR))
        return ahead

    def _bring(self, owner: CopyOwner, role: Role) -> Ahead:
        # role: of a decode.
        device, copy, nbytes = self._device, owner.copy, owner.nbytes
        if copy.codec is not None and copy.buffer is None:
            self._encodings.await_size(copy)
        recipe = owner.recipe
        whole = copy.codec is None and recipe.contiguous
        sizes: tuple[int, ...] = recipe.sizes
        strides = recipe.strides
        if not whole:
            sizes, strides = (nbytes // owner.dtype.itemsize,), FLAT
        try:
            result = device.allocate(sizes, strides, dtype=owner.dtype)
        except RuntimeError as error:
            raise MemoryError(f"swap-in of {nbytes} bytes: {error}") from None
        if type(result) is not torch.Tensor:
            raise without_memory(result)
        issued = device.now()
        if copy.codec is not None:
            return Ahead(result, self._encodings.decode(copy, result, role, issued), issued)
        buffer, out = copy.buffer, copy.out
        assert buffer is not None  # its owner is alive
        assert out is not None
        back = device.copy(result, buffer, nbytes, role="h2d", after=(out, issued))
        copy.is_read_until(back, device, self._lock)
        return Ahead(result, back, issued)
