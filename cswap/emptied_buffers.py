"""Buffers whose memory has been let go, to be filled with memory again.

Where the host's memory is the device's, a pool keeps little idle, and the next step takes as much
again. To give a tensor new memory takes less than half of the time of making one, and the pool
knows the tensor already.
"""

from __future__ import annotations

from collections import defaultdict
from typing import TYPE_CHECKING, Final, Generic, TypeVar

if TYPE_CHECKING:
    from collections.abc import Iterator

    import torch

T = TypeVar("T")

MOST: Final = 1024
"""Buffers without memory that are kept, each of about a kilobyte; the next one replaces another."""


class EmptiedBuffers(Generic[T]):
    """Buffers without memory, by size, each in an object of its pool's.

    The caller holds its lock.
    """

    __slots__ = ("_by_size", "_n")

    def __init__(self) -> None:
        self._by_size: defaultdict[int, list[T]] = defaultdict(list)
        self._n = 0

    def __iter__(self) -> Iterator[T]:
        """All of them."""
        return (owner for owners in self._by_size.values() for owner in owners)

    def empty(self, buffer: torch.Tensor, owner: T) -> None:
        """Let go of a buffer's memory; does nothing if torch does not allow it.

        Args:
            buffer: [n] uint8; nobody works on it any more.
            owner: the object that holds it.
        """
        storage = buffer.untyped_storage()
        if not storage.resizable():  # NumPy has seen it
            return
        storage.resize_(0)
        if self._n >= MOST and self._by_size:
            self.take(next(iter(self._by_size)))  # of a size of which there has long been one
        self._by_size[buffer.numel()].append(owner)
        self._n += 1

    def take(self, size: int) -> T | None:
        """The owner of one without memory; None: there is none. Args: size: in bytes."""
        owners = self._by_size.get(size)
        if not owners:
            return None
        owner = owners.pop()
        if not owners:
            del self._by_size[size]
        self._n -= 1
        return owner

    def recount(self) -> None:
        """Count them again, after an interrupt between two statements."""
        for size in [size for size, owners in self._by_size.items() if not owners]:
            del self._by_size[size]
        self._n = sum(map(len, self._by_size.values()))


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
