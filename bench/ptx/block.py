"""One block of threads in execution: who runs next, barriers, and the memory that it sees."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numpy.typing import NDArray

from bench.ptx.exchange import exchange
from bench.ptx.faults import DeadlockError, UndefinedError, UnsupportedError
from bench.ptx.kernel import SHARED_BASE
from bench.ptx.memory import ALLOCATED, Space
from bench.ptx.races import Clock, Races, access, same_target
from bench.ptx.registers import Registers

if TYPE_CHECKING:
    from bench.ptx.kernel import Node
    from bench.ptx.launch import Launch

Lanes = NDArray[Any]

_FULL: Final = np.uint32(0xFFFFFFFF)


class ThreadBlock:
    """Threads that run together.

    They are scheduled in *units*: all of the block, or warps in any order. In a unit those threads
    go on first that are furthest behind in the text, so that threads that diverged meet again.

    Attributes:
        tid: [threads] u32.
        n_threads: of the block.
        ntid: the same, as u32.
        ctaid: index of the block.
        nctaid: number of blocks.
        params: the launch's.
    """

    def __init__(self, launch: Launch, index: int) -> None:
        self._launch, self._kernel, self._report = launch, launch.kernel, launch.report
        n = self.n_threads = launch.threads
        self.params = launch.params
        self.tid = np.arange(n, dtype=np.uint32)
        self.ntid, self.ctaid, self.nctaid = np.uint32(n), np.uint32(index), np.uint32(launch.grid)
        self._index, self._memory = index, launch.memory
        self._warp = (self.tid >> np.uint32(5)).astype(np.intp)
        self._n_warps = -(-n // 32)
        self._registers = Registers(self._kernel, n)
        self._clock = Clock(self._n_warps)
        self._shared = self._make_shared()
        watched = launch.races
        self._races = Races(self._shared.size, self._clock, self._report.note) if watched else None
        everyone = np.arange(n)
        if launch.schedule == "warp":
            warps = (everyone[32 * w : 32 * w + 32] for w in range(self._n_warps))
            self._units: list[dict[int, Lanes]] = [{0: warp} for warp in warps]
        else:
            self._units = [{0: everyone}]
        self._held: list[dict[int, Lanes]] = [{} for _ in self._units]  # wait for their warp
        self._at_barrier: list[tuple[int, int, Lanes]] = []  # unit, node, threads
        self._exited = np.zeros(n, bool)

    def step(self) -> bool:
        """Run one node of one group of threads; False when all threads have exited.

        Raises:
            DeadlockError: nobody can go on, or the launch has taken too many steps.
        """
        self._report.steps += 1
        if self._report.steps > self._launch.max_steps:
            raise DeadlockError(f"more than {self._launch.max_steps} steps")
        able = [u for u, groups in enumerate(self._units) if groups]
        if not able:
            if self._exited.all():
                return False
            raise DeadlockError(f"block {self._index}: threads wait at {self._waiting()}")
        unit = able[0] if len(able) == 1 else able[int(self._launch.rng.integers(len(able)))]
        at = min(self._units[unit])
        threads = self._units[unit].pop(at)
        node = self._kernel.nodes[at]
        self._report.lines.add(node.line)
        if self._launch.counts:
            self._report.executed[at] += int(np.unique(threads >> 5).size)
        if node.sync is not None:
            self._meet(unit, at, node, threads)
        else:
            self._run(unit, at, node, threads)
        return True

    # Memory, as the translated blocks call it. i are the threads, or a slice of all.

    def load_global(
        self, address: Lanes, size: int, count: int, i: Any, line: int, *, read_only: bool
    ) -> list[Lanes]:
        """Words of global memory; notes words that another block wrote in this launch."""
        offsets, values = self._memory.load(address, size, count, self._where(line))
        writer, own = self._memory.writer, self._index + 1
        for k in range(0, size * count, size):
            found = writer[offsets + k]
            if read_only and (found != 0).any():
                self._report.note(f"ld.global.nc at line {line} of what this launch wrote")
            elif ((found != 0) & (found != own)).any():
                self._report.note(f"load at line {line} of what another block wrote")
        return values

    def store_global(
        self, address: Lanes, values: list[Lanes], size: int, i: Any, line: int
    ) -> None:
        """Store words; notes bytes that two threads or two blocks write."""
        offsets = self._memory.store(address, values, size, self._where(line))
        if self._races is not None and np.unique(offsets).size != offsets.size:
            same_target(offsets, values, line, "global", self._report.note)
        writer, own = self._memory.writer, self._index + 1
        for k in range(size * len(values)):
            found = writer[offsets + k]
            if ((found != 0) & (found != own)).any():
                self._report.note(f"store at line {line} to what another block wrote")
            writer[offsets + k] = own

    def load_shared(
        self, address: Lanes, size: int, count: int, i: Any, line: int, *, read_only: bool
    ) -> list[Lanes]:
        """Words of shared memory."""
        offsets, values = self._shared.load(address, size, count, self._where(line))
        self._note_unwritten("reads", line)
        if self._races is not None:
            own = self.tid[i].astype(np.int32), self._warp[i]
            self._races.read(access(offsets, size * count, *own, line))
        return values

    def store_shared(
        self, address: Lanes, values: list[Lanes], size: int, i: Any, line: int
    ) -> None:
        """Store words in shared memory."""
        offsets = self._shared.store(address, values, size, self._where(line))
        if self._races is not None:
            if np.unique(offsets).size != offsets.size:
                same_target(offsets, values, line, "shared", self._report.note)
            own = self.tid[i].astype(np.int32), self._warp[i]
            self._races.write(access(offsets, size * len(values), *own, line))

    def atomic(
        self, where: str, what: str, address: Lanes, value: Lanes, i: Any, line: int
    ) -> Lanes:
        """Change words one thread after the other, in any order; the words before."""
        space = self._memory if where == "global" else self._shared
        size = value.dtype.itemsize
        words = space.words(size).view(value.dtype)
        offsets, _ = space.load(address, size, 1, self._where(line))
        if space is self._shared:
            self._note_unwritten("atomic on", line)
            if self._races is not None:
                own = self.tid[i].astype(np.int32), self._warp[i]
                self._races.write(access(offsets, size, *own, line), atomic=True)
        before = np.empty(value.size, value.dtype)
        for k in self._launch.rng.permutation(value.size):
            at = int(offsets[k]) // size
            before[k] = words[at]
            words[at] = _changed(what, words[at], value[k])
        return before

    def _make_shared(self) -> Space:
        kernel = self._kernel
        size = -(-(kernel.shared_end - SHARED_BASE + 256) // 256) * 256
        raw = self._launch.rng.integers(0, 256, size + 256, dtype=np.uint8)
        start = -raw.ctypes.data % 256
        shared = Space(raw[start : start + size], SHARED_BASE, "shared")
        for name, nbytes, _ in kernel.module.shared:
            at = kernel.names.shared_at[name] - SHARED_BASE
            shared.flags[at : at + nbytes] = ALLOCATED
        return shared

    def _where(self, line: int) -> str:
        return f"block {self._index}, PTX line {line}"

    def _note_unwritten(self, what: str, line: int) -> None:
        if self._shared.unwritten:
            self._report.note(f"{what} unwritten shared memory at line {line}")
            self._shared.unwritten.clear()

    def _waiting(self) -> str:
        nodes = [at for held in self._held for at in held]
        nodes += [at for _, at, _ in self._at_barrier]
        firsts = [self._kernel.nodes[at].first for at in nodes]
        return ", ".join(sorted({self._kernel.module.code[k].text for k in firsts}))

    # Scheduling

    def _run(self, unit: int, at: int, node: Node, threads: Lanes) -> None:
        i = slice(None) if threads.size == self.n_threads else threads
        if node.run is None:
            raise UnsupportedError(f"line {node.line}")
        taken = node.run(self, self._registers.contents, i, threads.size)
        after = at + 1 if node.jump is None else node.jump
        if node.exits:
            self._exited[threads] = True
            self._release_barrier()
        elif node.conditional:
            taken = np.broadcast_to(taken, threads.shape)
            for target, some in ((after, threads[taken]), (at + 1, threads[~taken])):
                if some.size:
                    self._go(unit, target, some)
        else:
            self._go(unit, after, threads)

    def _go(self, unit: int, at: int, threads: Lanes) -> None:
        if at >= len(self._kernel.nodes):
            raise UnsupportedError("a jump past the end")
        found = self._units[unit].get(at)
        if found is not None:
            threads = np.sort(np.concatenate((found, threads)))
        self._units[unit][at] = threads

    def _meet(self, unit: int, at: int, node: Node, threads: Lanes) -> None:
        # Threads come to a barrier of the block, or to an operation of their warp.
        assert node.sync is not None
        op = node.sync.op
        if op.startswith(("bar.sync", "bar.red")):
            self._at_barrier.append((unit, at, threads))
            self._release_barrier()
            return
        if op.startswith("activemask"):
            raise UnsupportedError(op)
        held = self._held[unit].pop(at, None)
        if held is not None:
            threads = np.sort(np.concatenate((held, threads)))
        ready = self._complete_warps(node, threads)
        here = np.isin(self._warp[threads], ready)
        if not here.all():
            self._held[unit][at] = threads[~here]
        threads = threads[here]
        if threads.size == 0:
            return
        exchange(self._registers, node.sync, threads)
        self._clock.met[ready] += 1
        if op == "bar.warp.sync":
            self._clock.synced[ready] += 1
        self._go(unit, at + 1, threads)

    def _complete_warps(self, node: Node, threads: Lanes) -> Lanes:
        # Warps of which all lanes that the operation's mask names are there.
        assert node.sync is not None
        args = node.sync.args
        mask_arg = args[0] if node.sync.op == "bar.warp.sync" else args[-1]
        masks = self._registers.operand(mask_arg, threads).astype(np.uint32)
        if threads.size % 32 == 0 and (masks == _FULL).all():
            rows = threads.reshape(-1, 32)
            if ((rows[:, 0] & 31) == 0).all() and (rows[:, 31] - rows[:, 0] == 31).all():
                found: Lanes = rows[:, 0] >> 5
                return found
        lanes = threads & 31
        ready = []
        for w in np.unique(self._warp[threads]):
            mine = self._warp[threads] == w
            named = np.unique(masks[mine])
            if named.size != 1:
                raise UndefinedError(f"{node.line}: lanes of one warp name different masks")
            mask, present = int(named[0]), int(np.bitwise_or.reduce(1 << lanes[mine]))
            if present & ~mask:
                raise UndefinedError(f"{node.line}: run by lanes that its mask {mask:#x} lacks")
            if mask & ~self._alive(int(w)):
                raise UndefinedError(
                    f"{node.line}: mask {mask:#x} names lanes that exited or never were"
                )
            if present == mask:
                ready.append(int(w))
        return np.array(ready, np.intp)

    def _alive(self, warp: int) -> int:
        lanes = range(min(32, self.n_threads - 32 * warp))
        return sum(1 << k for k in lanes if not self._exited[32 * warp + k])

    def _release_barrier(self) -> None:
        waiting = sum(threads.size for _, _, threads in self._at_barrier)
        if not waiting or waiting < np.count_nonzero(~self._exited):
            return
        self._check_barrier()
        arrived, self._at_barrier = self._at_barrier, []
        nodes = {at: self._kernel.nodes[at] for _, at, _ in arrived}
        op = next(iter(nodes.values())).sync
        if op is not None and op.op.startswith("bar.red."):
            bits = np.concatenate([self._predicate(nodes[at], t) for _, at, t in arrived])
            what = op.op.split(".")[2]
            value: Any = {"or": bits.any(), "and": bits.all(), "popc": np.uint32(bits.sum())}[what]
            for _, at, threads in arrived:
                self._registers.set(nodes[at].target or "_", threads, value)
        self._clock.epoch += 1
        for unit, at, threads in arrived:
            self._go(unit, at + 1, threads)

    def _predicate(self, node: Node, threads: Lanes) -> Lanes:
        assert node.sync is not None
        operand = node.sync.args[-1]
        found = self._registers.operand(operand.lstrip("!"), threads).astype(bool)
        return ~found if operand.startswith("!") else found

    def _check_barrier(self) -> None:
        # All threads stand at barrier 0, and those of one warp at the same instruction.
        nodes = {at for _, at, _ in self._at_barrier}
        syncs = [self._kernel.nodes[at].sync for at in nodes]
        ops = {sync.op for sync in syncs if sync is not None}
        if len(ops) > 1:
            raise UndefinedError(f"one barrier reached by {ops}")
        for sync in syncs:
            if sync is not None and (sync.args[0] != "0" or len(sync.args) > 3):
                raise UnsupportedError(sync.text)
        if len(nodes) > 1:
            lines = sorted(self._kernel.nodes[at].line for at in nodes)
            self._report.note(f"barrier 0 reached at lines {lines}")
            where = np.full(self.n_threads, -1)
            for _, at, threads in self._at_barrier:
                where[threads] = at
            for w in range(self._n_warps):
                mine = where[32 * w : 32 * w + 32]
                if np.unique(mine[mine >= 0]).size > 1:
                    raise UndefinedError(f"lanes of warp {w} reach different barriers: {lines}")


def _changed(what: str, old: Any, new: Any) -> Any:
    a, b = int(old), int(new)
    results = {
        "add": a + b,
        "or": a | b,
        "and": a & b,
        "max": max(a, b),
        "min": min(a, b),
        "exch": b,
    }
    if what not in results:
        raise UnsupportedError(f"atom.{what}")
    kind = np.asarray(old).dtype
    bits = 8 * kind.itemsize
    value = results[what] & ((1 << bits) - 1)
    return kind.type(value - (value >> (bits - 1) << bits) if kind.kind == "i" else value)
