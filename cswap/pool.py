"""Reuse of large byte buffers: a fresh one costs a page fault per 4 KiB, more than a copy."""

from __future__ import annotations

import threading
from collections import OrderedDict
from functools import lru_cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

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


class BufferPool:
    """Buffers by size class. In use plus idle never exceeds the most that was ever in use."""

    def __init__(self, allocate: Callable[[int], torch.Tensor], idle_share: float = 1.0) -> None:
        """Make an empty pool.

        Args:
            allocate: gives [n] uint8 for n bytes.
            idle_share: of the most that was ever in use, what may be kept idle; less saves memory
                and costs page faults. ALWAYS_IDLE bytes may be, at any share.
        """
        self._allocate = allocate
        self._idle_share = idle_share
        self._lock = threading.Lock()
        self._idle: OrderedDict[int, list[torch.Tensor]] = OrderedDict()
        self._idle_bytes = 0
        self.in_use_bytes = 0
        self.peak_bytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """[>= nbytes] uint8."""
        size = size_class(nbytes)
        with self._lock:
            self.in_use_bytes += size
            buffers = self._idle.get(size)
            found = buffers.pop() if buffers else None
            if found is not None:
                self._idle_bytes -= size
            if self.in_use_bytes > self.peak_bytes:
                self.peak_bytes = self.in_use_bytes
            if self._idle_bytes:
                self._shrink()
        if found is not None:
            return found
        try:
            return self._allocate(size)
        except BaseException:
            with self._lock:
                self.in_use_bytes -= size
            raise

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that `take` gave."""
        size = buffer.numel()
        with self._lock:
            self.in_use_bytes -= size
            self._idle.setdefault(size, []).append(buffer)
            self._idle.move_to_end(size)
            self._idle_bytes += size
            self._shrink()

    def clear(self) -> None:
        """Let go of everything that is idle."""
        with self._lock:
            self._idle.clear()
            self._idle_bytes = 0

    @property
    def idle_bytes(self) -> int:
        """Bytes kept for reuse."""
        return self._idle_bytes

    def _shrink(self) -> None:
        # The class that was given back longest ago goes first.
        spare = self.peak_bytes - self.in_use_bytes
        idle = max(ALWAYS_IDLE, int(self._idle_share * self.peak_bytes))
        while self._idle_bytes > min(spare, idle):
            size, buffers = next(iter(self._idle.items()))
            if buffers:
                buffers.pop()
                self._idle_bytes -= size
            if not buffers:
                del self._idle[size]
