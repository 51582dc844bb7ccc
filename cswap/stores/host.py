"""The host tier: pooled memory for encodings, up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.pool import Allowance, BufferPool

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


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
            allowance: of which it takes the bytes that it hands out; other stores may, too.
            idle_share: see `BufferPool`.
        """
        self._pool = BufferPool(allocate, idle_share, allowance)

    def take(self, nbytes: int) -> torch.Tensor | None:
        """[>= nbytes] uint8, or None if the limit is reached or the host has no more memory."""
        try:
            return self._pool.take(nbytes)
        except MemoryError:
            return None

    def give_back(self, buffer: torch.Tensor) -> None:
        """Return a buffer that nobody reads or writes any more."""
        self._pool.give_back(buffer)

    def trim(self, idle_bytes: int) -> None:
        """Keep no more than so many bytes for reuse."""
        self._pool.trim(idle_bytes)

    def close(self) -> None:
        """Keep nothing for reuse from here on; encodings that are in use stay."""
        self._pool.close()

    @property
    def in_use_bytes(self) -> int:
        """Bytes handed out, size classes included."""
        return self._pool.in_use_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes handed out or kept for reuse; never more than were ever in use at once."""
        return self._pool.in_use_bytes + self._pool.idle_bytes
