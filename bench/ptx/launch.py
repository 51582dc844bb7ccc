"""A launch of a kernel: its arguments, its options, and notes on it. `grid.py` runs it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Literal

import numpy as np

from bench.ptx.faults import UndefinedError
from bench.ptx.parse import DTYPE

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.ptx.kernel import Kernel
    from bench.ptx.memory import Memory

Order = Literal["sequential", "shuffled", "interleaved"]
Schedule = Literal["block", "warp"]


@dataclass(frozen=True, slots=True)
class Options:
    """How a launch runs.

    Attributes:
        order: of the blocks: one after the other, the same shuffled, or a random one each step.
        schedule: of a block's threads: all in step where they can be, or a random warp each step.
        seed: of all that is random, the junk in shared memory included.
        races: whether to look for races.
        counts: whether to count how often each node runs.
        max_steps: nodes that all blocks together may run.
    """

    order: Order = "sequential"
    schedule: Schedule = "block"
    seed: int = 0
    races: bool = True
    counts: bool = False
    max_steps: int = 3_000_000


@dataclass(slots=True)
class Report:
    """The record of a launch.

    Attributes:
        notes: how often each oddity was seen: races, reads of unwritten memory, and more.
        executed: warps that ran each node, by its index, where they were counted.
        lines: first lines of the nodes that ran.
        steps: nodes that ran.
    """

    notes: Counter[str] = field(default_factory=Counter)
    executed: Counter[int] = field(default_factory=Counter)
    lines: set[int] = field(default_factory=set)
    steps: int = 0

    def note(self, text: str) -> None:
        """Count an oddity."""
        self.notes[text] += 1


class Launch:
    """A grid of blocks of threads with one value per parameter, cut to its size as a driver does.

    Raises:
        UndefinedError: the block is larger than the kernel allows, or a value is missing.
    """

    def __init__(
        self,
        kernel: Kernel,
        memory: Memory,
        grid: int,
        threads: int,
        values: Sequence[int],
        options: Options,
    ) -> None:
        module = kernel.module
        if module.max_threads is not None and threads > module.max_threads:
            raise UndefinedError(f"{threads} threads, but .maxntid is {module.max_threads}")
        if len(values) != len(module.params):
            raise UndefinedError(f"{len(values)} values for {len(module.params)} parameters")
        self.kernel, self.memory, self.grid, self.threads = kernel, memory, grid, threads
        sizes = [DTYPE[kind].itemsize for _, kind in module.params]
        self.params = [
            np.array(int(v) & ((1 << 8 * size) - 1), f"u{size}")[()]
            for v, size in zip(values, sizes, strict=True)
        ]
        self.races, self.schedule, self.counts = options.races, options.schedule, options.counts
        self.max_steps, self.order = options.max_steps, options.order
        self.rng = np.random.default_rng(options.seed)
        self.report = Report()
        memory.writer[: memory.top] = 0
