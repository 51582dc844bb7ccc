"""Reuse of large byte buffers: a fresh one costs a page fault per 4 KiB, more than a copy."""

from __future__ import annotations

import threading
import weakref
from collections import OrderedDict, deque
from functools import lru_cache
from typing import TYPE_CHECKING, Final

import torch

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS: Final = 8
"""Size classes per power of two: a buffer is at most 1/STEPS larger than asked for."""

SMALLEST: Final = 4096

ALWAYS_IDLE: Final = 4 << 20
"""Bytes that may be kept idle whatever the share: with few tensors, a quarter would be none."""


@lru_cache(maxsize=1024)
def size_class(nbytes: int) -> int:
    """Smallest size class that holds ``nbytes``.

    >>> size_class(1), size_class(4097), size_class(1 << 20), size_class((1 << 20) + 1)
    (4096, 4608, 1048576, 1179648)
    """
    if nbytes <= SMALLEST:
        return SMALLEST
    step = max(SMALLEST // STEPS, (1 << (nbytes - 1).bit_length() - 1) // STEPS)
    return -(-nbytes // step) * step


class Allowance:
    """Bytes that several pools may use together. Thread-safe."""

    def __init__(self, limit: int | None) -> None:
        """Args: limit: in bytes; None: none."""
        self._limit = limit
        self._lock = threading.Lock()
        self._used = 0

    def reserve(self, nbytes: int) -> bool:
        """Take so many of the bytes, if there are."""
        with self._lock:
            if self._limit is not None and self._used + nbytes > self._limit:
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
    """Buffers by size class. In use plus idle never exceeds the most that was ever in use.

    A buffer that nobody gives back is counted until it dies, and no longer.
    """

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        idle_share: float = 1.0,
        allowance: Allowance | None = None,
    ) -> None:
        """Make an empty pool.

        Args:
            allocate: gives [n] uint8 for n bytes.
            idle_share: of the most that was ever in use, the part that may be kept idle; less
                saves memory and costs page faults. ALWAYS_IDLE bytes may be, at any share.
            allowance: of which the pool takes the bytes that it hands out; None: no limit.
        """
        self._allocate = allocate
        self._idle_share = idle_share
        self._allowance = Allowance(None) if allowance is None else allowance
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self._idle_bytes = 0
        self._closed = False
        self._lent: dict[int, _Lent] = {}
        self._dead: deque[weakref.ref[torch.Tensor]] = deque()
        self._in_use_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor | None:
        """[>= nbytes] uint8; None if the allowance does not permit it.

        Raises:
            MemoryError: there is no more memory.
        """
        size = size_class(nbytes)
        if not self._allowance.reserve(size):
            self._note_deaths()
            if not self._allowance.reserve(size):
                return None
        try:
            buffer = self._reuse(size)
            return self._lend(self._allocate(size) if buffer is None else buffer)
        except BaseException:
            self._allowance.release(size)
            raise

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that `take` gave; a second time does nothing."""
        with self._lock:
            lent = self._lent.pop(id(buffer), None)
            if lent is None:
                return
            size = lent.size
            self._in_use_bytes -= size
            self._idle.setdefault(size, []).append(buffer)
            self._idle.move_to_end(size)
            self._idle_bytes += size
            self._shrink()
        self._allowance.release(size)

    def clear(self) -> None:
        """Let go of everything that is idle."""
        self.trim(0)

    def trim(self, idle_bytes: int) -> None:
        """Let go of idle buffers until so many bytes are left, the least recently used first."""
        self._note_deaths()
        with self._lock:
            self._shrink_to(idle_bytes)

    def close(self) -> None:
        """Keep nothing idle from here on; buffers that are in use may still be given back."""
        self._closed = True
        self.clear()

    @property
    def in_use_bytes(self) -> int:
        """Bytes handed out, size classes included."""
        self._note_deaths()
        return self._in_use_bytes

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse."""
        return self._idle_bytes

    def _reuse(self, size: int) -> torch.Tensor | None:
        if self._dead:
            self._note_deaths()
        with self._lock:
            buffers = self._idle.get(size)
            if not buffers:
                return None
            self._idle_bytes -= size
            return buffers.pop()

    def _lend(self, buffer: torch.Tensor) -> torch.Tensor:
        lent = _Lent(buffer, self._dead.append)
        lent.key, lent.size = id(buffer), buffer.numel()
        if lent.key in self._lent:  # of a buffer that died at this address
            self._note_deaths()
        with self._lock:
            self._lent[lent.key] = lent
            self._in_use_bytes += lent.size
            self.peak_bytes = max(self.peak_bytes, self._in_use_bytes)
            if self._idle_bytes:
                self._shrink()
        return buffer

    def _note_deaths(self) -> None:
        while self._dead:
            try:
                lent = self._dead.popleft()
            except IndexError:  # another thread took it
                return
            assert isinstance(lent, _Lent)
            with self._lock:
                if self._lent.get(lent.key) is not lent:  # the address serves another buffer
                    continue
                del self._lent[lent.key]
                self._in_use_bytes -= lent.size
            self._allowance.release(lent.size)

    def _shrink(self) -> None:
        idle = 0 if self._closed else max(ALWAYS_IDLE, int(self._idle_share * self.peak_bytes))
        self._shrink_to(min(self.peak_bytes - self._in_use_bytes, idle))

    def _shrink_to(self, limit: int) -> None:
        # The class that was given back longest ago goes first.
        while self._idle_bytes > limit:
            size, buffers = next(iter(self._idle.items()))
            if buffers:
                buffers.pop()
                self._idle_bytes -= size
            if not buffers:
                del self._idle[size]
