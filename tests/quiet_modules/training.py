"""A model of which some modules save little, and what the tests of quiet modules ask of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.autograd.graph import saved_tensors_hooks

from cswap import hook_stack

STEPS = 36
"""Of training, after which many calls are not recorded."""

LARGE = 1 << 40


class Block(nn.Module):
    """A residual block with a norm, two products and dropout."""

    def __init__(self, width):
        super().__init__()
        self.norm = nn.BatchNorm1d(width)
        first, second = nn.Linear(width, width), nn.Linear(width, width)
        self.body = nn.Sequential(first, nn.GELU(), second, nn.Dropout(0.2))

    def forward(self, x):
        return x + self.body(self.norm(x))


class Net(nn.Module):
    """Blocks, of which the first ones save less than the last."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.small = nn.Sequential(Block(4), Block(4))
        self.wide = nn.Linear(4, 64)
        self.large = nn.Sequential(Block(64), Block(64))

    def forward(self, x):
        return self.large(self.wide(self.small(x)))


class Training:
    """A model, and steps of its training."""

    def __init__(self, model=None):
        self.model: Any = Net() if model is None else model
        self.n_steps = 0

    def step(self, rows=16):
        torch.manual_seed(100 + self.n_steps)
        self.n_steps += 1
        self.model.zero_grad()
        self.model(torch.randn(rows, 4)).square().mean().backward()
        return [p.grad.clone() for p in self.model.parameters() if p.grad is not None]


def same_bits(mine, its):
    return all(torch.equal(a, b) for a, b in zip(mine, its, strict=True))


def noting(seen):
    """Hooks that note the tensors' sizes."""

    def pack(x):
        seen.append(x.numel())
        return x.detach()

    return saved_tensors_hooks(pack, lambda x: x)


def hooks_are_off():
    return hook_stack.top(True) is None


def settle(training, packs=None, **options):
    """Train until the next step is not recorded."""
    for _ in range(STEPS):
        training.step(**options)
    if packs is not None:
        packs.clear()
