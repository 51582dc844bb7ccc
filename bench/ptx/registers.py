"""The registers of a block's threads."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from bench.ptx.kernel import Kernel

Lanes = NDArray[Any]


class Registers:
    """One value per thread for each register of a kernel; junk at first.

    Attributes:
        n_threads: of the block.
        contents: [registers] arrays [threads], as the translated blocks index them.
    """

    def __init__(self, kernel: Kernel, n_threads: int) -> None:
        self.n_threads, self._index = n_threads, kernel.names.index
        self.contents = [values.copy() for values in kernel.junk(n_threads)]

    def operand(self, operand: str, threads: Lanes) -> Lanes:
        """The value of an operand in some threads."""
        index = self._index.get(operand)
        if index is None:
            return np.full(threads.size, int(operand, 0) & 0xFFFFFFFF, np.uint32)
        return self.contents[index][threads]

    def set(self, register: str, threads: Lanes, value: Any) -> None:
        """Let a register hold a value in some threads."""
        if register != "_":
            self.contents[self._index[register]][threads] = value
