"""The interpreter's memory: bytes with a flag each, and guards between allocations."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.ptx.faults import MemoryFaultError

ALLOCATED, WRITTEN, READ_ONLY = 1, 2, 4
"""Flags of a byte."""

GUARD: Final = 256
"""Bytes between two allocations that belong to nobody."""

Bytes = NDArray[np.uint8]
Lanes = NDArray[Any]
"""A value per thread."""


class Space:
    """Bytes at addresses from ``base`` on.

    Attributes:
        data: [n] u8, at a multiple of 16.
        flags: [n] u8.
        unwritten: how many loads met bytes that nobody wrote, by place in the PTX.
    """

    def __init__(self, data: Bytes, base: int, name: str) -> None:
        self.data, self.base, self.name, self.size = data, base, name, data.size
        self.flags = np.zeros(data.size, np.uint8)
        self.unwritten: Counter[str] = Counter()
        self._views = {k: data.view(f"u{k}") for k in (1, 2, 4, 8)}
        self._flag_views = {k: self.flags.view(f"u{k}") for k in (1, 2, 4, 8)}
        self._all = {
            flag: {k: np.frombuffer(bytes([flag] * k), f"u{k}")[0] for k in (1, 2, 4, 8)}
            for flag in (ALLOCATED, ALLOCATED | WRITTEN, ALLOCATED | READ_ONLY)
        }

    def words(self, size: int) -> Lanes:
        """The memory as words of ``size`` bytes."""
        return self._views[size]

    def load(self, address: Lanes, size: int, count: int, where: str) -> tuple[Lanes, list[Lanes]]:
        """(offsets, ``count`` words of ``size`` bytes) at each address.

        Raises:
            MemoryFaultError: an access is misaligned, or meets bytes that are not allocated.
        """
        total = size * count
        offset = self._offsets(address, total, where)
        step = min(total, 8)
        one, good = self._all[ALLOCATED][step], self._all[ALLOCATED | WRITTEN][step]
        for k in range(0, total, step):
            found = self._flag_views[step][(offset + k) // step] & good
            if (found != good).any():
                outside = (found & one) != one
                if outside.any():
                    bad = int(offset[np.argmax(outside)])
                    raise MemoryFaultError(f"{where}: load of {total} bytes at {bad:#x}: outside")
                self.unwritten[where] += 1
        at = offset // size
        return offset, [self._views[size][at + k] for k in range(count)]

    def store(self, address: Lanes, values: list[Lanes], size: int, where: str) -> Lanes:
        """Store words of ``size`` bytes at each address; the offsets.

        Raises:
            MemoryFaultError: an access is misaligned, or meets bytes that may not be written.
        """
        total = size * len(values)
        offset = self._offsets(address, total, where)
        step = min(total, 8)
        wanted, asked = self._all[ALLOCATED][step], self._all[ALLOCATED | READ_ONLY][step]
        for k in range(0, total, step):
            at = (offset + k) // step
            found = self._flag_views[step][at] & asked
            if (found != wanted).any():
                bad = int(offset[np.argmax(found != wanted)])
                raise MemoryFaultError(
                    f"{where}: store of {total} bytes at {bad:#x}: outside or read-only"
                )
            self._flag_views[step][at] = self._all[ALLOCATED | WRITTEN][step]
        at = offset // size
        for k, value in enumerate(values):
            self._views[size][at + k] = value
        return offset

    def _offsets(self, address: Lanes, total: int, where: str) -> Lanes:
        offset = np.asarray(address, np.uint64) - np.uint64(self.base)
        beyond = offset > np.uint64(self.size - total)
        if beyond.any():
            bad = int(np.asarray(address).flat[int(np.argmax(beyond))])
            raise MemoryFaultError(f"{where}: {self.name} address {bad:#x}: no memory")
        if total > 1:
            odd = (offset & np.uint64(total - 1)) != 0
            if odd.any():
                bad = int(offset[int(np.argmax(odd))])
                raise MemoryFaultError(
                    f"{where}: {self.name} offset {bad:#x}: not a multiple of {total}"
                )
        return offset.astype(np.intp)


@dataclass(frozen=True, slots=True)
class Allocation:
    """A piece of global memory.

    Attributes:
        address: of its first byte, in this process.
        data: its bytes.
        flags: theirs.
    """

    address: int
    data: Bytes
    flags: Bytes


class Memory(Space):
    """Global memory: a piece of this process's own, so that addresses are real ones.

    Attributes:
        writer: 1 + the block that wrote each byte in the current launch, or 0.
        top: offset behind the last allocation and its guard.
    """

    def __init__(self, nbytes: int, seed: int = 0) -> None:
        raw = np.random.default_rng(seed).integers(0, 256, nbytes + 512, dtype=np.uint8)
        start = -raw.ctypes.data % 256
        data = raw[start : start + nbytes // 256 * 256]
        super().__init__(data, data.ctypes.data, "global")
        self.top = GUARD
        self.writer = np.zeros(self.size, np.int32)

    def allocate(self, nbytes: int, offset: int = 0, fill: int | None = None) -> Allocation:
        """Memory at a multiple of 256 plus ``offset``; without ``fill`` it is junk, unwritten.

        Raises:
            MemoryError: there is no room for it.
        """
        at = self.top + offset
        self.top = -(-(at + nbytes + GUARD) // 256) * 256
        if self.top > self.size:
            raise MemoryError("the interpreter's global memory is full")
        self.flags[at : at + nbytes] = ALLOCATED
        part = slice(at, at + nbytes)
        found = Allocation(self.base + at, self.data[part], self.flags[part])
        if fill is not None:
            found.data[:] = fill
            found.flags[:] |= WRITTEN
        return found

    def reset(self) -> None:
        """Forget every allocation."""
        self.flags[: self.top] = 0
        self.top = GUARD
