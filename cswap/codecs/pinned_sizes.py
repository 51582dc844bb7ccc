"""Words of pinned memory in which kernels leave the sizes of encodings: `SizePool`."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    import numpy as np
    import torch
    from numpy.typing import NDArray


class PinnedSize:
    """A `LateSize`: a word of pinned memory that the encode kernel writes."""

    __slots__ = ("_pool", "_slot", "_value")

    def __init__(self, pool: SizePool, slot: _Slot) -> None:
        self._pool = pool
        self._slot: _Slot | None = slot
        self._value = 0

    @property
    def address(self) -> int:
        """Address of the word; 0 after its value was read."""
        return 0 if self._slot is None else self._slot.address

    def value(self) -> int:
        """See `LateSize.value`."""
        slot = self._slot
        if slot is not None:  # in this order: an interrupt leaves it to the next call
            self._value = int(slot.numbers[slot.index])
            self._slot = None
            self._pool.give_back(slot)
        return self._value


@dataclass(frozen=True, slots=True)
class _Slot:
    numbers: NDArray[np.int64]
    index: int

    @property
    def address(self) -> int:
        return int(self.numbers.ctypes.data) + 8 * self.index


class SizePool:
    """Pinned words for sizes. A word dropped unread is not reused: a kernel may still write it."""

    def __init__(self, allocate: Callable[[], torch.Tensor]) -> None:
        """Args: allocate: returns [k] i64, pinned."""
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: list[_Slot] = []

    def take(self) -> PinnedSize:
        """Take a free word."""
        with self._lock:
            if not self._free:
                numbers = self._allocate().numpy()
                self._free = [_Slot(numbers, i) for i in range(numbers.size)]
            return PinnedSize(self, self._free.pop())

    def give_back(self, slot: _Slot) -> None:
        """Return a word after its value was read."""
        with self._lock:
            self._free.append(slot)
