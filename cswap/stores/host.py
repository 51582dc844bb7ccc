"""The host tier: pooled memory for encodings, up to a limit."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

from cswap.pool import BufferPool, size_class

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class Allowance:
    """Bytes that the host stores of all devices may use together. Thread-safe."""

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


class HostStore:
    """Host memory for encodings. Overhead: at most 1/8 per encoding (size classes)."""

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        allowance: Allowance,
        idle_share: float = 1.0,
    ) -> None:
        """Make an empty store.

        Args:
            allocate: host memory of the device.
            allowance: of which it takes what it hands out; other stores may take of it, too.
            idle_share: see `BufferPool`.
        """
        self._pool = BufferPool(allocate, idle_share)
        self._allowance = allowance

    def take(self, nbytes: int) -> torch.Tensor | None:
        """[>= nbytes] uint8, or None if the limit is reached or the host has no more memory."""
        size = size_class(nbytes)
        if not self._allowance.reserve(size):
            return None
        try:
            return self._pool.take(nbytes)
        except MemoryError:
            self._allowance.release(size)
            return None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nobody reads or writes any more."""
        self._pool.give_back(buffer)
        self._allowance.release(buffer.numel())

    @property
    def in_use_bytes(self) -> int:
        """Bytes handed out, size classes included."""
        return self._pool.in_use_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes handed out or kept for reuse; never more than were ever in use at once."""
        return self._pool.in_use_bytes + self._pool.idle_bytes
