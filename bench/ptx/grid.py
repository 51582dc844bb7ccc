"""Runs the blocks of a launch, in any order."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from bench.ptx.block import ThreadBlock

if TYPE_CHECKING:
    from bench.ptx.launch import Launch, Report


def run_blocks(launch: Launch) -> Report:
    """Run all blocks."""
    waiting = list(range(launch.grid))
    if launch.order != "sequential":
        launch.rng.shuffle(waiting)
    with np.errstate(all="ignore"):
        if launch.order == "interleaved":
            _interleave(launch, [ThreadBlock(launch, index) for index in waiting])
        else:
            for index in waiting:
                block = ThreadBlock(launch, index)
                while block.step():
                    pass
    for where, count in launch.memory.unwritten.items():
        launch.report.notes[f"reads unwritten global memory at {where}"] += count
    launch.memory.unwritten.clear()
    return launch.report


def _interleave(launch: Launch, blocks: list[ThreadBlock]) -> None:
    while blocks:
        k = int(launch.rng.integers(len(blocks)))
        for _ in range(int(launch.rng.integers(1, 12))):
            if not blocks[k].step():
                del blocks[k]
                break
