"""Races in a block's shared memory: accesses by two threads, one a write, that nothing orders.

Between two barriers of the block (an *epoch*) accesses of different warps are unordered. Within a
warp a ``bar.warp.sync`` orders them. A shuffle or a vote makes lanes meet but orders no memory:
accesses that only these separate are noted as "weak".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Callable

Lanes = NDArray[Any]

SEVERAL: Final = -2
"""In place of a thread or a warp: more than one."""


class Clock:
    """How often the warps of a block have met: counters that only grow.

    Attributes:
        epoch: barriers of the whole block.
        met: [warps], operations at which all lanes of a warp met.
        synced: [warps], those of them that order memory.
    """

    def __init__(self, n_warps: int) -> None:
        self.epoch = 0
        self.met = np.zeros(n_warps, np.int64)
        self.synced = np.zeros(n_warps, np.int64)


@dataclass(frozen=True, slots=True)
class Access:
    """Bytes that several threads access by one instruction, an element per byte.

    Attributes:
        at: offset of each byte.
        thread: which accesses it.
        warp: its warp.
        line: of the PTX.
    """

    at: Lanes
    thread: Lanes
    warp: Lanes
    line: int


def access(at: Lanes, nbytes: int, thread: Lanes, warp: Lanes, line: int) -> Access:
    """``nbytes`` bytes from each offset on."""
    if nbytes > 1:
        at = (at[:, None] + np.arange(nbytes)).ravel()
        thread, warp = np.repeat(thread, nbytes), np.repeat(warp, nbytes)
    return Access(at, thread, warp, line)


class _Last:
    # The last access of one kind to each byte.

    def __init__(self, size: int) -> None:
        self.epoch = np.full(size, -1, np.int32)
        self.thread = np.full(size, -1, np.int32)
        self.warp = np.full(size, -1, np.int32)
        self.met = np.zeros(size, np.int64)
        self.synced = np.zeros(size, np.int64)
        self.atomic = np.zeros(size, bool)
        self.line = np.zeros(size, np.int32)

    def record(self, a: Access, clock: Clock, *, atomic: bool) -> None:
        self.epoch[a.at], self.thread[a.at], self.warp[a.at] = clock.epoch, a.thread, a.warp
        self.met[a.at], self.synced[a.at] = clock.met[a.warp], clock.synced[a.warp]
        self.atomic[a.at], self.line[a.at] = atomic, a.line


class Races:
    """Watches one block's shared memory.

    Args:
        size: bytes of it.
        clock: of the block.
        note: is told about every race, once per instruction that meets one.
    """

    def __init__(self, size: int, clock: Clock, note: Callable[[str], None]) -> None:
        self._clock, self._note = clock, note
        self._writes, self._reads = _Last(size), _Last(size)

    def read(self, a: Access) -> None:
        """Threads load bytes."""
        self._compare(a, self._writes, "write then read", atomic=False)
        reads = self._reads
        fresh = reads.epoch[a.at] != self._clock.epoch
        thread = np.where(fresh | (reads.thread[a.at] == a.thread), a.thread, SEVERAL)
        warp = np.where(fresh | (reads.warp[a.at] == a.warp), a.warp, SEVERAL)
        reads.record(a, self._clock, atomic=False)
        reads.thread[a.at], reads.warp[a.at] = thread, warp
        # Several threads of this very instruction may share a byte: the arrays kept the last one.
        reads.thread[a.at[reads.thread[a.at] != a.thread]] = SEVERAL
        reads.warp[a.at[reads.warp[a.at] != a.warp]] = SEVERAL

    def write(self, a: Access, *, atomic: bool = False) -> None:
        """Threads store bytes, or change them atomically."""
        self._compare(a, self._writes, "write then write", atomic=atomic)
        self._compare(a, self._reads, "read then write", atomic=False)
        self._writes.record(a, self._clock, atomic=atomic)

    def _compare(self, a: Access, last: _Last, what: str, *, atomic: bool) -> None:
        found = (last.epoch[a.at] == self._clock.epoch) & (last.thread[a.at] != a.thread)
        if atomic:
            found &= ~last.atomic[a.at]
        if not found.any():
            return
        at, warp = a.at[found], a.warp[found]
        across = last.warp[at] != warp
        close = ~across & (last.met[at] == self._clock.met[warp])
        weak = ~across & ~close & (last.synced[at] == self._clock.synced[warp])
        for mask, kind in (
            (across, "RACE across warps"),
            (close, "RACE within a warp"),
            (weak, "weak: within a warp only shfl/vote between"),
        ):
            if mask.any():
                other = int(last.line[at[int(np.argmax(mask))]])
                self._note(f"{kind}, {what}: lines {other}, {a.line}")


def same_target(
    offsets: Lanes, values: list[Lanes], line: int, where: str, note: Callable[[str], None]
) -> None:
    """Note a store by which several threads write to one place."""
    value = np.stack([np.broadcast_to(v, offsets.shape) for v in values], 1)
    order = np.argsort(offsets, kind="stable")
    at, value = offsets[order], value[order]
    same = at[1:] == at[:-1]
    if not same.any():
        return
    if (value[1:][same] != value[:-1][same]).any():
        note(f"RACE: {where} store at line {line}: threads store different values to one place")
    else:
        note(f"{where} store at line {line}: threads store one value to one place")
