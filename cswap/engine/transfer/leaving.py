"""Tensors whose own memory a side stream has yet to read: bounded, in the order of the device."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cswap.engine.transfer.handle import State

if TYPE_CHECKING:
    import torch

    from cswap.devices.base import Event
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.resources import Resources


class _Source(NamedTuple):
    """One tensor's own memory.

    Attributes:
        handle: of the tensor.
        memory: to be held until it has been read.
        read: fires when it has been read for the last time.
        issued: the moment on the compute stream at which it was saved.
    """

    handle: Handle
    memory: torch.Tensor
    read: Event
    issued: Event


class Leaving:
    """The sources under way, oldest first. Thread-safe; the executor's lock is taken inside."""

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._device, self._lock = resources.over_link, resources.lock
        self._counters, self._resources = resources.counters, resources
        self._sources: deque[_Source] = deque()
        self.nbytes = 0

    def add(self, handle: Handle, memory: torch.Tensor, read: Event, issued: Event) -> None:
        """A tensor has been submitted: hold its memory until ``read`` has fired, or is joined."""
        with self._lock:
            self._sources.append(_Source(handle, memory, read, issued))
            self.nbytes += handle.raw_nbytes

    def let_go_read(self) -> None:
        """Let go of the oldest tensors, as far as they have been read and are safe."""
        while True:
            with self._lock:
                if not self._sources:
                    return
                oldest = self._sources[0]
                if not oldest.read.query() or not _may_go(oldest.handle):
                    return
                self._remove_oldest()
            self._let_go(oldest.handle)

    def recount(self) -> None:
        """After an interrupt, and a wait for the device: nothing is under way."""
        with self._lock:
            self.nbytes = sum(source.handle.raw_nbytes for source in self._sources)
        self.let_go_read()

    def let_go_down_to(self, limit_bytes: int) -> None:
        """Let go of the oldest tensors until so many bytes are left.

        The compute stream waits for them to be read; the host does not. Their memory is used again
        by computation that comes after that wait.
        """
        while True:
            with self._lock:
                if not self._sources or self.nbytes <= limit_bytes:
                    return
                oldest = self._sources[0]
                self._remove_oldest()
            try:
                self._device.join(oldest.read, oldest.issued)
            except BaseException:
                self._device.drain()  # a side stream may be reading it
                raise
            self._let_go(oldest.handle)

    def _remove_oldest(self) -> None:
        self.nbytes -= self._sources[0].handle.raw_nbytes
        self._sources.popleft()  # last: an interrupt before it leaves sums alone wrong

    def _let_go(self, handle: Handle) -> None:
        modified = handle.modified()
        with self._lock:
            if handle.state is not State.LEAVING:
                return
            if modified:  # unpack has to raise
                handle.to(State.KEPT)
                self._counters.stay("modified", handle.raw_nbytes)
            else:
                handle.to(State.STORED)
                self._counters.hold(device=-handle.raw_nbytes)
                handle.let_go()
        if modified:
            self._resources.free_stored(handle)


def _may_go(handle: Handle) -> bool:
    # Whether a tensor that has been read is not needed any more to have it stored. An encoding that
    # nobody can ask for is never made safe.
    wanted = handle.state is State.LEAVING and handle.alive
    return not wanted or all(section.safe for section in handle.sections)
