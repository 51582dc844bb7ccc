"""Releases the handles that nobody can ask for any more.

Note [when a handle is released]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The tensors of a handle are freed when its token dies. The rest is to be done in Python: give its
host memory back to the pool, delete its files, correct the accounts. It cannot be done where the
token dies, which is inside autograd's C++ code or anywhere in the garbage collector, maybe under
our own locks. So deaths are only noted there. They are dealt with when the engine is next called:
by pack, by unpack, at the end of every backward, when a step begins, when a ``with`` ends. If
nothing calls it (a graph was dropped without a backward, and nothing runs after that), a thread
does, a moment later.
"""

from __future__ import annotations

import atexit
import os
import threading
import weakref
from collections import deque
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Final

from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.packed import Token

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cswap.engine.link.link import Link
    from cswap.engine.transfer.device_lanes import Lane, Lanes
    from cswap.engine.transfer.handle import Handle
    from cswap.pool import BufferPool, Loan
    from cswap.stats.counters import Counters

EVERY_S: Final = 0.1
"""How often the thread looks, while there are handles."""

IDLE_LOOKS: Final = 20
"""Looks without any handle after which it sleeps until there is one."""


MOST_LATER: Final = 16
"""The dead that wait to be released together, since one alone finds cold caches: handles without
bytes."""


class Death(weakref.ref[Token]):
    """A weak reference to a token that is put on a list when the token dies.

    Its callback is the list's ``append``. No Python code runs where the token dies, which may be
    anywhere: under our locks, and where an interrupt would be swallowed.

    Attributes:
        handle: of the token.
        lane: of its device.
    """

    __slots__ = ("handle", "lane")

    handle: Handle
    lane: Lane


class EncodingDeath(weakref.ref[Encoded]):
    """The same for a tensor without a handle.

    Attributes:
        loan: memory of its encoding; None: it has been given back.
        host: of which that is.
    """

    __slots__ = ("host", "loan")
    __hash__ = object.__hash__  # without a call of the tensor's
    __eq__ = object.__eq__

    loan: Loan | None
    host: BufferPool


class Reclaimer:
    """The handles of one engine, from their birth to their release. Thread-safe.

    Attributes:
        encodings: those of tensors without handles, whose memory has not been given back.
        deaths: of tokens and of encodings without handles, to be dealt with by `collect`.
        later: of tokens whose tensors are computed again (see `release_later`).
    """

    def __init__(
        self,
        release: Callable[[Handle, Lane], None],
        lanes: Lanes,
        counters: Counters,
    ) -> None:
        """Make it.

        Args:
            release: frees all that is left of a handle; may be called twice for one.
            lanes: the engine's, whose links bury their dead themselves.
            counters: the engine's.
        """
        self._release, self._lanes, self._counters = release, lanes, counters
        self.encodings: set[EncodingDeath] = set()
        self.deaths: deque[weakref.ref[Any]] = deque()
        self.later: deque[weakref.ref[Any]] = deque()
        self._lock = threading.Lock()
        self._n_born = self._n_released = 0
        _reclaimers.add(self)

    def watch(self, token: Token) -> None:
        """Release the token's handle after its death."""
        death = Death(token, self.deaths.append)
        death.handle, death.lane = token.handle, token.lane
        token.handle.token = death
        self._n_born += 1
        if not _thread.awake:
            _thread.wake()

    def watch_encoding(self, encoded: Encoded, loan: Loan, host: BufferPool) -> None:
        """Give an encoding's memory back to the store after the death of its tensor."""
        death = EncodingDeath(encoded, self.deaths.append)
        death.loan, death.host = loan, host
        self.encodings.add(death)
        self._n_born += 1
        if not _thread.awake:
            _thread.wake()

    def release_later(self, token: Token) -> None:
        """Let the token's death wait for up to `MOST_LATER` others: its handle holds no bytes.

        Args:
            token: it is watched, and its tensor is computed again.
        """
        death = Death(token, self.later.append)
        death.handle, death.lane = token.handle, token.lane
        token.handle.token = death  # the death before is gone, and its callback with it

    @property
    def has_handles(self) -> bool:
        """Whether a handle is alive, or waits to be released."""
        in_slots = any(link.alive for link in self._lanes.links)
        return in_slots or self._n_born != self._n_released

    @property
    def encoded_bytes(self) -> int:
        """Bytes of host memory that hold encodings of tensors without handles."""
        loans = [death.loan for death in self.encodings.copy()]
        return sum(loan.known.size for loan in loans if loan is not None)

    def collect(self, *, in_step: bool = False) -> None:
        """Release the handles that have died so far.

        Args:
            in_step: in the middle of a step; then those on the list ``later`` wait for others.
        """
        while self.deaths:
            self.collect_encodings()
            self._release_first(self.deaths)
        if not (in_step and len(self.later) <= MOST_LATER):
            while self.later:
                self._release_first(self.later)
        if not in_step:
            for link in self._lanes.links:
                self._release_dead(link)

    def _release_dead(self, link: Link) -> None:
        try:
            link.release_dead()
        except Exception as error:  # of the device: the others are released
            self._counters.fall_back("release", error)

    def collect_beside(self) -> None:
        """`collect`, in a thread that does nothing else."""
        for link in self._lanes.links:
            link.prepare_thread()
        self.collect()

    @staticmethod
    def wake() -> None:
        """Tensors may be saved from now on."""
        if not _thread.awake:
            _thread.wake()

    def collect_encodings(self) -> None:
        """`collect` for encodings that have died, up to the first other death: with fewer calls."""
        deaths, encodings, moves = self.deaths, self.encodings, self._counters.moves
        with self._lock:
            while deaths:
                death = deaths[0]  # an interrupt leaves it where it is, for the next time
                if type(death) is not EncodingDeath:
                    return
                # An interrupt may come after this line as well: then the pool notices that the
                # memory has gone.
                loan, death.loan = death.loan, None
                try:
                    if loan is not None:
                        death.host.put_back(loan)
                        moves.append((0, -loan.known.size, 0, "", 0, 0, 0.0))
                    encodings.discard(death)
                except Exception as error:  # of the device: all others are released
                    self._counters.fall_back("release", error)
                deaths.popleft()
                self._n_released += 1

    def _release_first(self, deaths: deque[weakref.ref[Any]]) -> None:
        # The first of these deaths, if it is no encoding's.
        with self._lock:
            if not deaths or type(deaths[0]) is EncodingDeath:
                return
            death = deaths[0]  # see above
            try:
                if isinstance(death, Death):
                    self._release(death.handle, death.lane)
            except Exception as error:
                self._counters.fall_back("release", error)
            deaths.popleft()
            self._n_released += 1

    @contextmanager
    def paused(self) -> Iterator[None]:
        """No handle is released meanwhile."""
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
        """There is a handle now."""
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
                # A handle that is born from here on wakes it; one born before is seen below.
                self._wanted.clear()
                self.awake = False
                if not any(reclaimer.has_handles for reclaimer in _all_reclaimers()):
                    self._wanted.wait()
                idle = 0

    def end(self) -> None:
        """Stop before the interpreter goes: a thread inside torch would take the process down."""
        self._stopping.set()
        self._wanted.set()
        if self._thread is not None:
            self._thread.join(10)

    def forked(self) -> None:
        """In a forked child there is no thread, until it has a handle of its own."""
        self._begin()
        for reclaimer in _all_reclaimers():
            reclaimer.forked()


def _all_reclaimers() -> list[Reclaimer]:
    while True:
        with suppress(RuntimeError):  # another thread has added one meanwhile
            return list(_reclaimers)


def _collect_all() -> bool:
    # Whether a handle is alive. A function of its own: its local variable would keep the last
    # reclaimer, and so an engine, alive until the next look.
    busy = False
    for reclaimer in _all_reclaimers():
        reclaimer.collect_beside()
        busy = busy or reclaimer.has_handles
    return busy


_reclaimers: weakref.WeakSet[Reclaimer] = weakref.WeakSet()
_thread = _Thread()

atexit.register(_thread.end)
if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_thread.forked)
