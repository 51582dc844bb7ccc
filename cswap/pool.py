"""Reuse of large byte buffers: a fresh one costs a page fault per 4 KiB, more than a copy.

Note [a buffer that is free later]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On a device the host gives a buffer back as soon as it has issued the last work that uses it, long
before that work has run. So a buffer comes back with the event after which it is free, and whoever
takes it next lets the stream that will write it wait for that event. Nobody waits on the host, and
a pool of bounded size bounds the device's memory however far the host is ahead.
"""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final, NamedTuple, Protocol

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


class Loan(NamedTuple):
    """A buffer taken from a pool.

    Attributes:
        buffer: [>= the bytes asked for] uint8.
        after: it may be written once this has fired; None: now.
    """

    buffer: torch.Tensor
    after: Event | None


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


class _Lent(weakref.ref[torch.Tensor]):
    """Notices a buffer that dies instead of being given back, as an interrupt makes it.

    Its callback is a deque's ``append``: no Python code runs where a tensor dies.
    """

    __slots__ = ("key", "size")

    key: int
    size: int


class BufferPool:
    """Buffers by size class.

    In use plus idle never exceeds the most that was ever in use, or ``enough_bytes``.

    A buffer that nobody gives back is counted until it dies, and no longer. Thread-safe.

    Attributes:
        raises: whether `take` raises where there is no more memory, rather than give None.
        enough_bytes: see `__init__`; may change.
    """

    raises = True

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        idle_share: float = 1.0,
        allowance: Allowance | None = None,
        *,
        enough_bytes: int | None = None,
        discard: Callable[[Loan], None] | None = None,
        size_of: Callable[[int], int] = size_class,
    ) -> None:
        """Make an empty pool.

        Args:
            allocate: gives [n] uint8 for n bytes.
            idle_share: of the most that was ever in use, the part that may be kept idle; less
                saves memory and costs page faults. ALWAYS_IDLE bytes may be, at any share.
            allowance: of which the pool takes the bytes that it hands out; None: no limit.
            enough_bytes: a pool that holds so much hands out buffers that are free later rather
                than make new ones; None: always makes new ones.
            discard: lets go of a buffer that is free later; default: simply.
            size_of: the buffer's size, in bytes, for the bytes that are asked for.
        """
        self._allocate = allocate
        self._idle_share = idle_share
        self._allowance = Allowance(None) if allowance is None else allowance
        self.enough_bytes = enough_bytes
        self._discard = discard
        self._size_of = size_of
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, deque[Loan]] = OrderedDict()
        self._idle_bytes = 0
        self._closed = False
        self._lent: dict[int, _Lent] = {}
        self._dead: deque[weakref.ref[torch.Tensor]] = deque()
        self._in_use_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> Loan | None:
        """A buffer of at least so many bytes; None if the allowance does not permit it.

        Raises:
            MemoryError: there is no more memory; see `raises`.
        """
        size = self._size_of(nbytes)
        if self._dead:
            self._note_deaths()
        # Whoever shares the allowance has none to lose, and none is asked where there is no limit.
        limited = self._allowance.limit is not None
        if limited and not self._allowance.reserve(size):
            return None
        try:
            with self._lock:
                buffers = self._idle.get(size)
                if not buffers and not limited and self._idle_bytes > size:
                    buffers = self._slightly_larger(size)
                if buffers and (buffers[0].after is None or self._may_take(buffers[0], size)):
                    # The newest is in the cache; on a device the oldest is free first.
                    loan = buffers.pop() if buffers[-1].after is None else buffers.popleft()
                    self._idle_bytes -= loan.buffer.numel()
                    self._lend(loan.buffer)
                    return loan
            loan = Loan(self._allocate(size), None)
            with self._lock:
                self._lend(loan.buffer)
                if self._idle_bytes:
                    self._shrink()
        except BaseException as error:
            if limited:
                self._allowance.release(size)
            if isinstance(error, MemoryError) and not self.raises:
                return None
            raise
        return loan

    def give_back(self, buffer: torch.Tensor, after: Event | None = None) -> None:
        """Return a buffer that `take` gave; a second time does nothing.

        Args:
            buffer: that nobody will issue work on any more.
            after: when the work issued on it has been done; None: it has been.
        """
        with self._lock:
            lent = self._lent.pop(id(buffer), None)
            if lent is None:
                return
            size = lent.size
            self._in_use_bytes -= size
            self._idle_bytes += size
            idle = self._idle.get(size)
            if idle is None:
                idle = self._idle[size] = deque()
            idle.append(Loan(buffer, after))
            self._idle.move_to_end(size)
            # Else no limit can be below it: what is in use and what is idle are as much as before.
            if self._closed or (self._idle_share < 1 and self._idle_bytes > ALWAYS_IDLE):
                self._shrink()
        if self._allowance.limit is not None:
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
            self._lent = {key: lent for key, lent in self._lent.items() if lent() is not None}
            self._in_use_bytes = sum(lent.size for lent in self._lent.values())
            self._idle_bytes = sum(size * len(loans) for size, loans in self._idle.items())

    def close(self) -> None:
        """Keep nothing idle from here on; buffers that are in use may still be given back."""
        self._closed = True
        self.clear()

    @property
    def is_limited(self) -> bool:
        """Whether an allowance limits what it hands out."""
        return self._allowance.limit is not None

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

    def _may_take(self, loan: Loan, size: int) -> bool:
        # Under the lock. A buffer that is free later is taken only where there are enough.
        if loan.after is None or self.enough_bytes is None or loan.after.query():
            return True
        return self._in_use_bytes + self._idle_bytes + size > self.enough_bytes

    def _lend(self, buffer: torch.Tensor) -> None:
        # Under the lock.
        key = id(buffer)
        if key in self._lent:  # of a buffer that died at this address
            self._forget(self._lent.pop(key))
        lent = _Lent(buffer, self._dead.append)
        lent.key, lent.size = key, buffer.numel()
        self._lent[key] = lent
        self._in_use_bytes += lent.size
        if self._in_use_bytes > self.peak_bytes:
            self.peak_bytes = self._in_use_bytes

    def _note_deaths(self) -> None:
        while self._dead:
            try:
                lent = self._dead.popleft()
            except IndexError:  # another thread took it
                return
            assert isinstance(lent, _Lent)
            with self._lock:
                if self._lent.get(lent.key) is lent:  # else its address serves another buffer
                    self._forget(self._lent.pop(lent.key))

    def _forget(self, lent: _Lent) -> None:
        # Under the lock.
        self._in_use_bytes -= lent.size
        if self._allowance.limit is not None:
            self._allowance.release(lent.size)

    def _shrink(self) -> None:
        idle = 0 if self._closed else max(ALWAYS_IDLE, int(self._idle_share * self.peak_bytes))
        limit = min(self.peak_bytes - self._in_use_bytes, idle)
        if self.enough_bytes is not None and not self._closed:
            # Buffers that are free later have to be several, or their users wait for each other.
            limit = max(limit, self.enough_bytes - self._in_use_bytes)
        if self._idle_bytes > limit:
            self._shrink_to(limit)

    def _shrink_to(self, limit: int) -> None:
        # The class that was given back longest ago goes first.
        while self._idle_bytes > limit:
            if not self._idle:  # an interrupt came between two statements
                self._idle_bytes = 0
                return
            size, buffers = next(iter(self._idle.items()))
            if buffers:
                loan = buffers.popleft()
                self._idle_bytes -= size
                if loan.after is not None and self._discard is not None:
                    self._discard(loan)
            if not buffers:
                del self._idle[size]
