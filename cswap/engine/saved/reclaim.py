"""Releases the memory of saved tensors that nobody can ask for any more.

Note [when a tensor is released]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The tensors of a handle are freed when its token dies, an encoding in host memory when its `Stored`
does. The rest is to be done in Python: give host memory back to the pool, delete files, correct the
accounts. It cannot be done where an owner dies, which is inside autograd's C++ code or anywhere in
the garbage collector, maybe under our own locks. So deaths are only noted there. They are dealt
with when the engine is next called: by pack, by unpack, at the end of every backward, when a step
begins, when a ``with`` ends. If nothing calls it (a graph was dropped without a backward, and
nothing runs after that), a thread does, a moment later.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from functools import partial
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cswap.engine.link.link import Link
    from cswap.engine.transfer.handle import Handle, Owner
    from cswap.engine.transfer.stored import Free, Held, Stored
    from cswap.stats.counters import Counters

EVERY_S: Final = 0.1
"""How often the thread looks, while something is held."""

IDLE_LOOKS: Final = 20
"""Looks without anything held after which it sleeps until there is something."""


class Death(weakref.ref[Any]):
    """A weak reference to an owner that is put on a list when the owner dies.

    Its callback is the list's ``append``. No Python code runs where the owner dies, which may be
    anywhere: under our locks, and where an interrupt would be swallowed.

    Attributes:
        bury: frees what is left; may be called twice.
        handle: of the owner; None: it has none.
        host_bytes: of host memory that are held until then.
    """

    __slots__ = ("bury", "handle", "host_bytes")
    __hash__ = object.__hash__  # without a call of the owner's
    __eq__ = object.__eq__

    bury: Callable[[], None]
    handle: Handle | None
    host_bytes: int


class Reclaimer:
    """The owners of one engine's tensors, from their birth to their release. Thread-safe.

    Attributes:
        links: of the engine's lanes, which bury their dead themselves.
        alive: owners whose death has not been dealt with.
        deaths: to be dealt with by `collect`.
    """

    def __init__(self, counters: Counters) -> None:
        """Args: counters: the engine's."""
        self._counters = counters
        self.links: list[Link] = []
        self.alive: set[Death] = set()
        self.deaths: deque[Any] = deque()  # of `Death`
        self._lock = threading.Lock()
        _reclaimers.add(self)

    def watch(self, token: Owner, release: Callable[[Handle, Any], None]) -> None:
        """After a token's death, call ``release`` with its handle and lane."""
        handle = token.handle
        self._watch(token, partial(release, handle, token.lane), handle=handle)

    def watch_encoding(self, stored: Stored, held: Held, free: Free) -> None:
        """After the death of an encoding, free its memory, or its file."""
        bury = partial(free, held)
        self._watch(stored, bury, host_bytes=stored.host_bytes)

    def _watch(
        self,
        owner: Any,
        bury: Callable[[], None],
        *,
        handle: Handle | None = None,
        host_bytes: int = 0,
    ) -> None:
        death = Death(owner, self.deaths.append)
        death.bury, death.handle, death.host_bytes = bury, handle, host_bytes
        self.alive.add(death)
        if not _thread.awake:  # as `wake`, a call less for each encoding
            _thread.wake()

    @property
    def holds(self) -> bool:
        """Whether something is held, or waits to be released."""
        return bool(self.alive) or any(link.alive for link in self.links)

    @property
    def device_bytes(self) -> int:
        """Bytes of tensors that have a handle and are in their own memory."""
        handles = [death.handle for death in self.alive.copy()]
        return sum(handle.device_bytes for handle in handles if handle is not None)

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold encodings of tensors that have not left over a link."""
        return sum(death.host_bytes for death in self.alive.copy())

    def collect(self, *, in_step: bool = False) -> None:
        """Release the dead. Args: in_step: in the middle of a step; then not over a link."""
        while self.deaths:
            self._bury_first()
        if in_step:
            return
        for link in self.links:
            self._release_dead(link)

    def _release_dead(self, link: Link) -> None:
        try:
            link.release_dead()
        except Exception as error:  # of the device: the others are released
            self._counters.fall_back("release", error)

    def _bury_first(self) -> None:
        with self._lock:
            if not self.deaths:
                return
            death = self.deaths[0]  # an interrupt leaves it where it is, for the next time
            try:
                death.bury()
                if death.host_bytes:
                    self._counters.hold(host=-death.host_bytes)
            except Exception as error:
                self._counters.fall_back("release", error)
            self.alive.discard(death)
            self.deaths.popleft()

    def collect_beside(self) -> None:
        """`collect`, in a thread that does nothing else."""
        for link in self.links:
            link.prepare_thread()
        self.collect()

    @staticmethod
    def wake() -> None:
        """Tensors may be saved from now on."""
        if not _thread.awake:
            _thread.wake()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Nothing is released meanwhile."""
        with self._lock:
            yield

    def forked(self) -> None:
        """In a forked child: the lock may have been held by a thread that is gone."""
        self._lock = threading.Lock()


class _Thread:
    """Collects for engines that nobody calls.

    Attributes:
        awake: whether it looks.
    """

    def __init__(self) -> None:
        self._begin()

    def _begin(self) -> None:
        self._thread: threading.Thread | None = None
        self.awake = False
        self._wanted = threading.Event()
        self._stopping = threading.Event()
        self._starting = threading.Lock()

    def wake(self) -> None:
        """Something is held now."""
        self.awake = True
        self._wanted.set()
        if self._thread is None and not self._stopping.is_set():
            with self._starting:
                if self._thread is None:
                    self._thread = threading.Thread(
                        target=self._run, name="cswap-reclaim", daemon=True
                    )
                    self._thread.start()

    def _run(self) -> None:
        idle = 0
        while not self._stopping.wait(EVERY_S):
            idle = 0 if _collect_all() else idle + 1
            if idle > IDLE_LOOKS:
                # A tensor that is saved from here on wakes it; one saved before is seen below.
                self._wanted.clear()
                self.awake = False
                if not any(reclaimer.holds for reclaimer in _all_reclaimers()):
                    self._wanted.wait()
                idle = 0

    def end(self) -> None:
        """Stop before the interpreter goes: a thread inside torch would take the process down."""
        self._stopping.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(10)

    def forked(self) -> None:
        """In a forked child there is no thread, until something is held there."""
        self._begin()
        for reclaimer in _all_reclaimers():
            reclaimer.forked()


def _all_reclaimers() -> list[Reclaimer]:
    while True:
        with suppress(RuntimeError):  # another thread has added one meanwhile
            return list(_reclaimers)


def _collect_all() -> bool:
    # Whether something is held. A function of its own: its local variable would keep the last
    # reclaimer, and so an engine, alive until the next look.
    busy = False
    for reclaimer in _all_reclaimers():
        reclaimer.collect_beside()
        busy = busy or reclaimer.holds
    return busy


_reclaimers: weakref.WeakSet[Reclaimer] = weakref.WeakSet()
_thread = _Thread()

atexit.register(_thread.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.forked)
