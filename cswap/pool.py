"""The host tier: memory for encodings that is used again, up to a limit.

A fresh buffer costs a page fault per 4 KiB, more than a copy.

Note [a buffer that is free later]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On a device the host gives a buffer back as soon as it has issued the last work that uses it, long
before that work has run. So a buffer comes back with the event after which it is free, and whoever
takes it next lets the stream that will write it wait for that event. Nobody waits on the host, and
a pool of bounded size bounds the device's memory however far the host is ahead.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections import OrderedDict, deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final, Protocol

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS: Final = 32
"""Size classes per power of two: a new buffer is at most 1/STEPS larger than asked for."""

CLASSES_ABOVE: Final = 3
"""An idle buffer also serves requests of so many smaller classes: encodings of a tensor differ in
size from step to step."""

SMALLEST: Final = 4096

ALWAYS_IDLE: Final = 4 << 20
"""Bytes that may be kept idle whatever the share: with few tensors, a quarter would be none."""


class Event(Protocol):
    """A point in the work of a device."""

    def query(self) -> bool:
        """Whether it has been reached."""
        ...


class Loan:
    """A buffer taken from a pool.

    Attributes:
        buffer: [>= the bytes asked for] uint8.
        after: it may be written once this has fired; None: now.
        known: what the pool knows of the buffer.
    """

    __slots__ = ("after", "buffer", "known")

    def __init__(self, buffer: torch.Tensor, after: Event | None, known: _Known) -> None:
        self.buffer, self.after, self.known = buffer, after, known


@lru_cache(maxsize=4096)
def size_class(nbytes: int) -> int:
    """Smallest size class that holds ``nbytes``.

    >>> size_class(1), size_class(4097), size_class(1 << 20), size_class((1 << 20) + 1)
    (4096, 4224, 1048576, 1081344)
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    step = _step_above(nbytes - 1)
    return -(-nbytes // step) * step


def _step_above(nbytes: int) -> int:
    # Bytes from one class to the next, around ``nbytes``.
    return max(SMALLEST, 1 << nbytes.bit_length() - 1) // STEPS


class Allowance:
    """Bytes that several pools may use together. Thread-safe."""

    def __init__(self, limit: int | None) -> None:
        """Args: limit: in bytes; None: none."""
        self.limit = limit
        self._lock = threading.Lock()
        self._used = 0

    def reserve(self, nbytes: int) -> bool:
        """Take so many of the bytes, if there are."""
        with self._lock:
            if self.limit is not None and self._used + nbytes > self.limit:
                return False
            self._used += nbytes
            return True

    def release(self, nbytes: int) -> None:
        """Put bytes back that were reserved."""
        with self._lock:
            self._used -= nbytes

    def recount(self, used_bytes: int) -> None:
        """Set the bytes in use, after an interrupt between two statements of a pool."""
        with self._lock:
            self._used = used_bytes


class _Known(weakref.ref[torch.Tensor]):
    """One buffer, from its birth to its death, which need not come while it is idle.

    It notices one that dies instead of being given back, as an interrupt makes it. Its callback is
    a deque's ``append``: no Python code runs where a tensor dies.

    Attributes:
        key: of the buffer among the pool's.
        size: in bytes.
        is_lent: whether somebody has taken it.
    """

    __slots__ = ("is_lent", "key", "size")

    key: int
    size: int
    is_lent: bool


class BufferPool:
    """Buffers by size class, which add 1/32 to each encoding, at most 1/8.

    In use plus idle never exceeds the most that was ever in use.

    A buffer that nobody gives back is counted until it dies, and no longer. Thread-safe.

    Attributes:
        is_limited: whether an allowance limits what it hands out.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        idle_share: float = 1.0,
        allowance: Allowance | None = None,
        *,
        discard: Callable[[Loan], None] | None = None,
        size_of: Callable[[int], int] = size_class,
    ) -> None:
        """Make an empty pool.

        Args:
            allocate: gives [n] uint8 for n bytes.
            idle_share: of the most that was ever in use, the part that may be kept idle; less
                saves memory and costs page faults. ALWAYS_IDLE bytes may be, at any share.
            allowance: of which the pool takes the bytes that it hands out; None: no limit.
            discard: lets go of a buffer that is free later; default: simply.
            size_of: the buffer's size, in bytes, for the bytes that are asked for.
        """
        self._allocate = allocate
        self._idle_share = idle_share
        self._allowance = Allowance(None) if allowance is None else allowance
        self.is_limited = self._allowance.limit is not None
        self._discard = discard
        self._size_of = size_of
        self._lock = threading.Lock()
        # By size, the newest last. Some sizes have none.
        self._idle: OrderedDict[int, deque[Loan]] = OrderedDict()
        self._idle_bytes = 0
        self._closed = False
        # Idle bytes up to which no buffer has to go when one comes back.
        self._most_idle = sys.maxsize if idle_share >= 1 else ALWAYS_IDLE
        self._known: dict[int, _Known] = {}
        self._dead: deque[weakref.ref[torch.Tensor]] = deque()
        self._in_use_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> Loan | None:
        """A buffer of at least so many bytes; None: the allowance or the host has no more.

        Args:
            nbytes: that are needed.
        """
        size = self._size_of(nbytes)
        if self._dead:
            self._note_deaths()
        # Whoever shares the allowance has none to lose, and none is asked where there is no limit.
        limited = self.is_limited
        if limited and not self._allowance.reserve(size):
            return None
        try:
            with self._lock:
                loans = self._idle.get(size)
                if not loans and not limited and self._idle_bytes > size:
                    loans = self._slightly_larger(size)
                if loans:
                    # The newest is in the cache; on a device the oldest is free first.
                    loan = loans.pop() if loans[-1].after is None else loans.popleft()
                    known = loan.known
                    known.is_lent = True
                    self._idle_bytes -= known.size
                    self._in_use_bytes = in_use = self._in_use_bytes + known.size
                    if in_use > self.peak_bytes:
                        self._raise_peak()
                    return loan
            buffer = self._allocate(size)
            with self._lock:
                loan = Loan(buffer, None, self._learn(buffer))
                loan.known.is_lent = True
                self._in_use_bytes += loan.known.size
                if self._in_use_bytes > self.peak_bytes:
                    self._raise_peak()
                if self._idle_bytes:
                    self._shrink()
        except BaseException as error:
            if limited:
                self._allowance.release(size)
            if isinstance(error, MemoryError):
                return None
            raise
        return loan

    def give_back(self, buffer: torch.Tensor, after: Event | None = None) -> None:
        """Return a buffer that `take` gave; a second time does nothing.

        Args:
            buffer: that nobody will issue work on any more.
            after: when the work issued on it has been done; None: it has been.
        """
        known = self._known.get(id(buffer))
        if known is not None and known() is buffer:
            self.put_back(Loan(buffer, after, known))

    def put_back(self, loan: Loan) -> None:
        """Return what `take` gave; a second time does nothing.

        Args:
            loan: nobody will issue work on its buffer any more, and has issued it before ``after``.
        """
        known = loan.known
        with self._lock:
            if not known.is_lent:
                return
            known.is_lent = False
            size = known.size
            self._in_use_bytes -= size
            self._idle_bytes += size
            loans = self._idle.setdefault(size, deque())
            self._idle.move_to_end(size)
            loans.append(loan)  # last, so that `recount` finds it wherever an interrupt comes
            # Else no limit can be below it: what is in use and what is idle are as much as before.
            if self._idle_bytes > self._most_idle:
                self._shrink()
        if self.is_limited:
            self._allowance.release(size)

    def clear(self) -> None:
        """Let go of everything that is idle."""
        self.trim(0)

    def trim(self, idle_bytes: int) -> None:
        """Let go of idle buffers until so many bytes are left, the least recently used first."""
        if self._dead:
            self._note_deaths()
        if self._idle_bytes > idle_bytes:
            with self._lock:
                self._shrink_to(idle_bytes)

    def recount(self) -> None:
        """Add up the bytes again, after an interrupt between two statements."""
        self._note_deaths()
        with self._lock:
            alive = {key: known for key, known in self._known.items() if known() is not None}
            idle = {id(loan.buffer) for loans in self._idle.values() for loan in loans}
            for known in alive.values():
                known.is_lent = known.key not in idle
            self._known = alive
            self._in_use_bytes = sum(known.size for known in alive.values() if known.is_lent)
            self._idle_bytes = sum(size * len(loans) for size, loans in self._idle.items())

    def close(self) -> None:
        """Keep nothing idle from here on; buffers that are in use may still be given back."""
        with self._lock:
            self._closed, self._most_idle = True, 0
        self.clear()

    @property
    def in_use_bytes(self) -> int:
        """Bytes handed out, size classes included."""
        if self._dead:
            self._note_deaths()
        return self._in_use_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse."""
        return self._idle_bytes

    def _slightly_larger(self, size: int) -> deque[Loan] | None:
        # Under the lock. Idle buffers of the next classes.
        step = _step_above(size)
        larger = range(size + step, size + CLASSES_ABOVE * step + 1, step)
        return next(filter(None, map(self._idle.get, larger)), None)

    def _learn(self, buffer: torch.Tensor) -> _Known:
        # Under the lock. A new buffer, which is not lent yet.
        key, size = id(buffer), buffer.numel()
        if key in self._known:  # of a buffer that died at this address
            self._forget(self._known.pop(key))
        known = _Known(buffer, self._dead.append)
        known.key, known.size, known.is_lent = key, size, False
        self._known[key] = known  # when it is complete: an interrupt may come anywhere
        return known

    def _raise_peak(self) -> None:
        # Under the lock. More is in use than ever before.
        self.peak_bytes = self._in_use_bytes
        if not self._closed:
            self._most_idle = max(self._most_idle, int(self._idle_share * self.peak_bytes))

    def _note_deaths(self) -> None:
        while self._dead:
            try:
                known = self._dead.popleft()
            except IndexError:  # another thread took it
                return
            assert isinstance(known, _Known)
            with self._lock:
                key = getattr(known, "key", None)  # an interrupt may have come before it was set
                if key is not None and self._known.get(key) is known:  # else of another buffer
                    self._forget(self._known.pop(key))

    def _forget(self, known: _Known) -> None:
        # Under the lock. One that was idle is not counted any more.
        if known.is_lent:
            known.is_lent = False
            self._in_use_bytes -= known.size
            if self.is_limited:
                self._allowance.release(known.size)

    def _shrink(self) -> None:
        limit = min(self.peak_bytes - self._in_use_bytes, self._most_idle)
        if self._idle_bytes > limit:
            self._shrink_to(limit)

    def _shrink_to(self, limit: int) -> None:
        # The class that was given back longest ago goes first.
        while self._idle_bytes > limit:
            if not self._idle:  # an interrupt came between two statements
                self._idle_bytes = 0
                return
            size, loans = next(iter(self._idle.items()))
            if loans:
                loan = loans.popleft()
                self._idle_bytes -= size
                if loan.after is not None and self._discard is not None:
                    self._discard(loan)
            if not loans:
                del self._idle[size]
