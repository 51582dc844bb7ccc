"""A stack of plain layers that saves as many bytes as it is asked to."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor, nn
from torch.optim import AdamW

from bench.workloads.data import generator_of
from bench.workloads.small_models import Net
from cswap.experiments.task import Batch, Task

WIDTH: Final = 256
N_BLOCKS: Final = 8
SAVED_PER_BLOCK: Final = 2
"""Outputs of ReLU that a block saves for backward; its matrix products save the same storages."""

MIB: Final = 1 << 20


class Stack(Net):
    """Blocks of linear, ReLU, linear, ReLU; all of one width."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.ReLU(), nn.Linear(WIDTH, WIDTH), nn.ReLU())
            for _ in range(N_BLOCKS)
        )
        self.head = nn.Linear(WIDTH, 10)

    def forward(self, inputs: Tensor) -> Tensor:
        """Return the logits, [batch, 10], of inputs, [batch, WIDTH]."""
        with self.probe():
            x = inputs
            for block in self.blocks:
                x = self.run_block(block, x)
            logits: Tensor = self.head(x)
            return logits


def batch_for(mib: int) -> int:
    """Inputs per step for so many MiB of saved float32 activations.

    >>> batch_for(64) * WIDTH * 4 * SAVED_PER_BLOCK * N_BLOCKS == 64 * MIB
    True
    """
    return max(1, mib * MIB // (WIDTH * 4 * SAVED_PER_BLOCK * N_BLOCKS))


def stack_task(mib: int, *, n_steps: int) -> Task:
    """Train a stack on noise: it is here for its bytes, there is nothing to learn.

    Args:
        mib: MiB of activations that a step saves.
        n_steps: training steps.
    """
    n = batch_for(mib)

    def batch(seed: int, step: int) -> Batch:
        generator = generator_of(seed, step)
        inputs = torch.randn(n, WIDTH, generator=generator)
        return inputs, torch.randint(10, (n,), generator=generator)

    return Task(
        name=f"stack {mib} MiB",
        n_steps=n_steps,
        peak_lr=1e-4,
        build=Stack,
        optimizer=lambda net: AdamW(net.parameters(), 0.0),
        batch=batch,
        validation=(batch(0, -1),),
        facts={
            "data": "normal noise",
            "n_blocks": N_BLOCKS,
            "width": WIDTH,
            "batch": n,
            "activation": "ReLU",
        },
    )
