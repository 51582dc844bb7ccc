"""The host tier: pooled memory for encodings, up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.pool import Allowance, BufferPool, Loan, size_class

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class HostStore:
    """Host memory for encodings. Size classes add at most 1/8 to each encoding."""

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        allowance: Allowance,
        idle_share: float = 1.0,
        size_of: Callable[[int], int] = size_class,
    ) -> None:
        """Make an empty store.

        Args:
            allocate: allocates host memory for the device.
            allowance: the limit on bytes handed out; other stores may share it.
            idle_share: see `BufferPool`.
            size_of: see `BufferPool`.
        """
        self._pool = BufferPool(allocate, idle_share, allowance, size_of=size_of)
        self.give_back = self._pool.give_back
        self.trim = self._pool.trim
        self.close = self._pool.close
        self.recount = self._pool.recount

    def take(self, nbytes: int) -> Loan | None:
        """Take memory for that many bytes; None if the limit is reached or the host has no more."""
        try:
            return self._pool.take(nbytes)
        except MemoryError:
            return None

    @property
    def in_use_bytes(self) -> int:
        """Bytes handed out, size classes included."""
        return self._pool.in_use_bytes

    @property
    def reserved_bytes(self) -> int:
        """Bytes handed out or kept for reuse; never more than the maximum in use at once."""
        return self._pool.in_use_bytes + self._pool.idle_bytes
