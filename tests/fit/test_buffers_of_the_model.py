"""A goal on a model whose buffers look like tensors that it saves."""

from __future__ import annotations

import random

import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.testing.engines import assert_empty

N_STEPS = 30


class Net(nn.Module):
    """Leaves layers out: at the place of a saved tensor there is a running mean in other steps."""

    def __init__(self):
        super().__init__()
        self.first, self.head = nn.Linear(32, 32), nn.Linear(32, 4)
        self.norm, self.batch_norm = nn.LayerNorm(32), nn.BatchNorm1d(32)

    def forward(self, x, left_out):
        x = functional.silu(x * 1.0)
        y = self.first(x)
        if left_out != 1:
            y = y + x
        if left_out != 2:
            y = self.norm(y)
        if left_out != 3:
            y = self.batch_norm(y)
        return self.head(functional.gelu(y))


def test_a_buffer_is_not_counted_as_memory_of_autograd():
    torch.manual_seed(0)
    net, numbers = Net(), random.Random(0)
    resident = 2 * sum(p.nbytes for p in net.parameters())
    with cswap.install(net, min_bytes=0, workers=0, fit=resident + 30_000) as handle:
        for n in range(N_STEPS):
            net.zero_grad(set_to_none=True)
            batch = torch.randn(18 if n % 7 == 0 else 16, 32)
            net(batch, numbers.choice([0, 0, 0, 1, 2, 3])).square().mean().backward()
        assert_empty(handle.engine)
