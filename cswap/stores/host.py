"""The host tier: pooled memory for encodings, up to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.pool import Allowance, BufferPool, size_class

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.pool import Loan


class HostStore(BufferPool):
    """Host memory for encodings. Size classes add 1/32 to each encoding, at most 1/8.

    `take` gives None as well if the host has no more memory.
    """

    raises = False

    def __init__(
        self,
        allocate: Callable[[int], torch.Tensor],
        allowance: Allowance,
        idle_share: float = 1.0,
        size_of: Callable[[int], int] = size_class,
        discard: Callable[[Loan], None] | None = None,
        *,
        refills: bool = False,
    ) -> None:
        """Make an empty store.

        Args:
            allocate: allocates host memory for the device.
            allowance: the limit on bytes handed out; other stores may share it.
            idle_share: see `BufferPool`.
            size_of: see `BufferPool`.
            discard: see `BufferPool`.
            refills: see `BufferPool`.
        """
        super().__init__(
            allocate, idle_share, allowance, size_of=size_of, discard=discard, refills=refills
        )

    @property
    def reserved_bytes(self) -> int:
        """Bytes handed out or kept for reuse; never more than the maximum in use at once."""
        return self.in_use_bytes + self.idle_bytes
