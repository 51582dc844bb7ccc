"""A model of one's own: `cswap bench accuracy --task own_model.py:make_task`."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from cswap.experiments.task import Task

SIDE = 16


def pictures(n: int, seed: int) -> tuple[Tensor, Tensor]:
    """Noise with a brighter half, left or right: [n, 1, SIDE, SIDE], and the classes 0 or 1."""
    source = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 1, SIDE, SIDE, generator=source)
    classes = torch.randint(2, (n,), generator=source)
    half = SIDE // 2
    for k in (0, 1):
        images[classes == k, :, :, k * half : (k + 1) * half] += 0.2
    return images, classes


def build() -> nn.Module:
    """A small convolutional network."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.ReLU(),
        nn.Conv2d(16, 16, 3, padding=1),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(16 * SIDE * SIDE, 2),
    )


def make_task() -> Task:
    """The task: model, optimizer, data, and the loss that would not matter."""
    return Task(
        name="halves",
        n_steps=40,
        peak_lr=1e-3,
        build=build,
        optimizer=lambda model: torch.optim.AdamW(model.parameters()),
        batch=lambda seed, step: pictures(32, seed * 1_000_003 + step),
        validation=(pictures(256, -1),),
        facts={"data": "noise with a brighter half", "batch": 32},
        margin=0.01,
    )
