"""Swapping over a link, on a device that lags behind the host.

Note [the host is ahead]
~~~~~~~~~~~~~~~~~~~~~~~~
The host issues a step's work long before the device runs it. Everything here is issued in one go
and ordered by events; the host waits for nothing, but for two things that it cannot know: how large
an encoding has become, and the contents of a file.

out   raw: one copy from the tensor's own memory. A codec of fixed size: encode, then copy. Others:
      encode; when the host learns the size, copy (`LinkOut._size_known`).
back  copies from the host, then a decode: on the compute stream if the computation waits for it, on
      the codec stream if it is ahead of its use.

Memory is bounded in the order of the device, whatever the host's lead:

sources   tensors that a side stream has yet to read (`Leaving`). Past the backlog the compute
          stream waits for the oldest, and that is let go at once: its memory is used again after
          that wait.
scratch   comes back with the event of its last use, and is taken again in the order of that event
          (see pool.py). Only encodings of unknown size hold it until the host looks; past the
          backlog the host waits for the oldest.
results   decoded on demand belong to the computation. Decoded ahead they are this executor's until
          the computation has joined their decode: nobody else may let go of them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.engine.replay.link import Link
from cswap.engine.transfer.ahead import Ahead
from cswap.engine.transfer.executor import Executor
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.leaving import Leaving
from cswap.engine.transfer.link_back import LinkBack
from cswap.engine.transfer.link_out import LinkOut
from cswap.engine.transfer.resources import Patience
from cswap.engine.transfer.section import cut
from cswap.engine.transfer.staging import Staging
from cswap.engine.transfer.unsized import Unsized
from cswap.errors import CorruptEncodingError, to_raise

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.devices.base import Event, LinkDevice
    from cswap.engine.transfer.executor import Memory
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.section import Section


UNDER_WAY: Final = (State.LEAVING, State.FETCHING)
"""A job has yet to change the handle's state."""


class LinkExecutor(Executor):
    """The executor of a device with a link."""

    _device: LinkDevice
    staging: Staging

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        super().__init__(resources)
        self._device = device = resources.over_link
        self._leaving = Leaving(resources)
        self.staging = Staging(device)
        unsized = Unsized(device, self.staging, resources.counters)
        streams = device.side_streams()
        self.link = None if streams is None else Link(resources, streams)
        self._out = LinkOut(resources, self._leaving, unsized, self._keep)
        self._back = LinkBack(resources)

    @property
    def leaving_bytes(self) -> int:
        """Bytes of tensors that a side stream has yet to read."""
        return self._leaving.nbytes + (0 if self.link is None else self.link.sources.nbytes)

    def let_go_down_to(self, limit_bytes: int) -> None:
        """See `Leaving.let_go_down_to`."""
        self._leaving.let_go_down_to(limit_bytes)
        if self.link is not None:
            self.link.let_go_down_to(max(0, limit_bytes - self._leaving.nbytes))

    def memory(self, handle: Handle, *, again: bool = False) -> Memory:
        """See `Executor.memory`."""
        self._resources.raise_damage()
        return super().memory(handle, again=again)

    def swap_out(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """See `Executor.swap_out`."""
        device = self._device
        device.pump()
        self.staging.sends(handle.raw_nbytes)
        most = None if codec.verbatim else device.section_bytes
        planned = handle.planned
        sections = cut(x, codec, (planned and planned.decision.section_bytes) or most)
        for section in sections:
            section.checked = self._what_to_check(x.dtype, codec)
        try:
            with self._lock:
                handle.sections = sections
                self._depart(handle, codec)
            issued = device.now()
            reads = self._send(handle, x, issued)
            if reads:
                self._hold_until_read(handle, x, reads, issued)
        except BaseException:
            device.drain()  # a side stream may be reading memory that nobody holds from here on
            self._take_back(handle)
            raise
        self._leaving.let_go_down_to(self.staging.out_bytes)

    def _send(self, handle: Handle, x: torch.Tensor, issued: Event) -> list[Event]:
        # Events after which the tensor's own memory has been read.
        reads: list[Event] = []
        for section in handle.sections:
            if handle.state is not State.LEAVING:  # there was no room for the section before
                break
            try:
                reads.append(self._out.send(handle, section, section.of(x), issued))
            except MemoryError as error:
                self._keep(handle, "memory", error)
            self._leaving.let_go_down_to(self.staging.out_bytes)
        return reads

    def _hold_until_read(
        self, handle: Handle, x: torch.Tensor, reads: list[Event], issued: Event
    ) -> None:
        read = reads[0]
        if len(reads) > 1:  # of several streams, perhaps
            read = self._device.submit(lambda _: None, role="codec", after=tuple(reads))
        handle.event = read
        self._leaving.add(handle, x, read, issued)
        if not _learns_its_size(handle):
            self._device.when(read, self._leaving.let_go_read)

    def _fetch(self, handle: Handle) -> torch.Tensor:
        device = self._device
        device.pump()
        out, result = self._allocate(handle)
        issued = device.now()
        try:
            decoded = self._back.bring(handle, out, result, "compute", issued)
        except CorruptEncodingError as error:
            device.drain()
            handle.error = CorruptEncodingError(str(error))
            raise
        except BaseException:
            device.drain()  # a submitted job may still write the memory
            raise
        device.join(decoded)
        if decoded.error is not None:
            if isinstance(decoded.error, CorruptEncodingError):
                handle.error = decoded.error
            raise to_raise(decoded.error)
        return result

    def prefetch(self, handle: Handle) -> bool:
        """See `Executor.prefetch`."""
        try:
            with self._lock:
                if handle.state is not State.STORED or handle.recomputed or not handle.alive:
                    return False
                handle.event, handle.prefetched = None, True
                self._move(handle, State.FETCHING)
            self._bring_ahead(handle)
        except MemoryError as error:  # unpack will try again, and says so if it must
            self._counters.fall_back("prefetch", error)
            return False
        except BaseException:
            self._device.drain()
            self._stored_again(handle)
            raise
        return True

    def _bring_ahead(self, handle: Handle) -> None:
        device = self._device
        device.pump()
        try:
            if not self._back.read_ahead(handle):
                self._stored_again(handle)
                return
            out, result = self._allocate(handle)
            issued = device.now()
            decoded = self._back.bring(handle, out, result, "codec", issued)
        except MemoryError:
            device.drain()
            self._stored_again(handle)
            raise
        except CorruptEncodingError:  # unpack meets it again, and raises
            device.drain()
            self._stored_again(handle)
            return
        with self._lock:
            wanted = handle.state is State.FETCHING
            if wanted:
                flat = out if handle.gathered else None
                self._ahead[id(handle)] = Ahead(result, decoded, issued, flat)
                handle.event = decoded
                self._move(handle, State.READY)
        if not wanted:  # released meanwhile
            device.join(decoded, issued)

    def _stored_again(self, handle: Handle) -> None:
        with self._lock:
            if handle.state is State.FETCHING:
                self._move(handle, State.STORED)

    def recount(self) -> None:
        """See `Executor.recount`."""
        self._leaving.recount()
        if self.link is not None:
            self.link.recount()

    def settle(self, handle: Handle) -> None:
        """See `Executor.settle`."""
        patience = Patience()
        while handle.state in UNDER_WAY or not all(map(_arrived, handle.sections)):
            events = [s.out for s in handle.sections if s.out is not None]
            for event in events if handle.event is None else [*events, handle.event]:
                self._device.wait(event)
            self._device.pump()
            self._leaving.let_go_read()  # older ones may have died meanwhile
            for section in handle.sections:
                if section.writing is not None:
                    section.writing.exception()  # waits
            patience.pause(handle.state.value)


def _learns_its_size(handle: Handle) -> bool:
    # Whether the callback that learns the size has yet to run. It lets go of what has been read.
    section = handle.sections[0]
    is_late = len(handle.sections) == 1 and not section.codec.verbatim
    return is_late and not section.placed and handle.state is State.LEAVING


def _arrived(section: Section) -> bool:
    # Whether its encoding is where it is to be.
    written = section.writing is None or section.writing.done()
    return written and (section.out is None or section.out.query())
