"""Tensors whose own memory a side stream has yet to read: bounded, in the order of the device."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from cswap.engine.transfer.handle import State
from cswap.engine.transfer.host_copy import HostCopy
from cswap.stats.counters import NO_TENSOR

if TYPE_CHECKING:
    import torch

    from cswap.devices.base import Event
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.resources import Resources


class _Source(NamedTuple):
    """One tensor's own memory.

    Attributes:
        accounts: of the tensor.
        memory: to be held until it has been read.
        read: fires when it has been read for the last time.
        issued: the moment on the compute stream at which it was saved.
    """

    accounts: Handle | HostCopy
    memory: torch.Tensor
    read: Event
    issued: Event


class Leaving:
    """The sources under way, oldest first. Thread-safe; the executor's lock is taken inside."""

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._device, self._lock = resources.device, resources.lock
        self._counters, self._resources = resources.counters, resources
        self._sources: deque[_Source] = deque()
        self._watched = False
        self._n_to_watch = 0  # of the sources; see `_needs_watching`
        self.nbytes = 0

    def add(self, handle: Handle, memory: torch.Tensor, read: Event, issued: Event) -> None:
        """A tensor has been submitted: hold its memory until ``read`` has fired, or is joined."""
        with self._lock:
            self._sources.append(_Source(handle, memory, read, issued))
            self.nbytes += handle.raw_nbytes

    def add_copy(
        self, copy: HostCopy, memory: torch.Tensor, read: Event, issued: Event, limit_bytes: int
    ) -> None:
        """The same for a tensor without a handle, and let go of others: until this limit is kept.

        Most copies need no callback of their own: each one lets go of those before. Encodings have
        one.
        """
        with self._lock:
            self._sources.append(_Source(copy, memory, read, issued))
            self.nbytes += copy.raw_nbytes
            self._n_to_watch += copy.codec is None  # `_needs_watching`
        if copy.codec is None:
            if not self._watched:
                self._watch(read)
            self.let_go_read()
        if self.nbytes > limit_bytes:
            self.let_go_down_to(limit_bytes)

    def let_go_read(self) -> None:
        """Let go of the oldest tensors, as far as they have been read and are safe."""
        while True:
            with self._lock:
                if not self._sources:
                    return
                oldest = self._sources[0]
                if not oldest.read.query() or not _may_go(oldest.accounts):
                    return
                self._remove_oldest()
            self._let_go(oldest.accounts)

    def go_on(self) -> None:
        """A tensor has become safe: let go of what has been read, and look again later."""
        if self._watched or not self._n_to_watch:
            self.let_go_read()
        else:
            self._look()

    def recount(self) -> None:
        """After an interrupt, and a wait for the device: nothing is under way."""
        with self._lock:
            self.nbytes = sum(source.accounts.raw_nbytes for source in self._sources)
            self._n_to_watch = sum(map(_needs_watching, self._sources))
        self._watched = False
        self.let_go_read()

    def _watch(self, read: Event) -> None:
        self._watched = True
        self._device.when(read, self._look)

    def _look(self) -> None:
        self._watched = False
        while True:
            self.let_go_read()
            with self._lock:
                # Callbacks of one stream have to be in the order of its work, so the newest copy is
                # the next one to be watched.
                newest = next(filter(_needs_watching, reversed(self._sources)), None)
                if newest is None:
                    return
                oldest = self._sources[0]
            if not newest.read.query():
                self._watch(newest.read)
                return
            if not _needs_watching(oldest):
                return  # whose callback looks again
            if not oldest.read.query():  # copies of a simulator are in no order
                self._watch(oldest.read)
                return

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
            self._let_go(oldest.accounts)

    def _remove_oldest(self) -> None:
        accounts = self._sources[0].accounts
        self.nbytes -= accounts.raw_nbytes
        if type(accounts) is HostCopy and accounts.codec is None:  # `_needs_watching`
            self._n_to_watch -= 1
        self._sources.popleft()  # last: an interrupt before it leaves sums alone wrong

    def _let_go(self, accounts: Handle | HostCopy) -> None:
        if isinstance(accounts, HostCopy):
            self._let_go_copied(accounts)
        else:
            self._let_go_handled(accounts)

    def _let_go_copied(self, copy: HostCopy) -> None:
        with self._lock:
            owner = copy()
            if owner is None or owner.source is None or copy.stays:
                return
            owner.source = None  # if it was modified, unpack raises
            copy.held_bytes -= copy.raw_nbytes
        self._counters.moves.append((-copy.raw_nbytes, 0, *NO_TENSOR))

    def _let_go_handled(self, handle: Handle) -> None:
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


def _needs_watching(source: _Source) -> bool:
    # A handle and an encoding have callbacks of their own.
    return isinstance(source.accounts, HostCopy) and source.accounts.codec is None


def _may_go(accounts: Handle | HostCopy) -> bool:
    # Whether a tensor that has been read is not needed any more to have it stored.
    if isinstance(accounts, HostCopy):
        return accounts.safe or accounts.stays or accounts() is None
    # An encoding that nobody can ask for is never made safe.
    wanted = accounts.state is State.LEAVING and accounts.alive
    return not wanted or all(section.safe for section in accounts.sections)
