"""Buffers whose memory has been let go, to be filled with memory again.

Where the host's memory is the device's, a pool keeps little idle, and the next step takes as much
again. To give a tensor new memory takes less than half of the time of making one, and the pool
knows the tensor already.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

    from cswap.pool import Loan

MOST: Final = 1024
"""Buffers without memory that are kept; each takes about a kilobyte."""


class EmptiedBuffers:
    """Buffers without memory, by size. The caller holds its lock."""

    __slots__ = ("_by_size", "_n")

    def __init__(self) -> None:
        self._by_size: defaultdict[int, list[Loan]] = defaultdict(list)
        self._n = 0

    def __iter__(self) -> Iterator[Loan]:
        """All of them."""
        return (loan for loans in self._by_size.values() for loan in loans)

    def empty(self, loan: Loan) -> None:
        """Let go of a buffer's memory. Args: loan: nobody works on its buffer any more."""
        loan.buffer.untyped_storage().resize_(0)
        if self._n >= MOST:
            self.clear()
        self._by_size[loan.known.size].append(loan)
        self._n += 1

    def take(self, size: int) -> Loan | None:
        """One without memory; None: there is none. Args: size: of its buffer, in bytes."""
        loans = self._by_size.get(size)
        if not loans:
            return None
        self._n -= 1
        return loans.pop()

    def clear(self) -> None:
        """Forget them all."""
        self._by_size.clear()
        self._n = 0


def fill(buffer: torch.Tensor, size: int) -> None:
    """Give a buffer memory again.

    Args:
        buffer: that was emptied.
        size: in bytes.

    Raises:
        MemoryError: there is none.
    """
    try:
        buffer.untyped_storage().resize_(size)
    except RuntimeError as error:  # torch's CPU allocator has no exception of its own for this
        raise MemoryError(str(error)) from error
