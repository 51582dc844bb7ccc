"""A goal on a model whose buffers look like tensors that it saves."""

from __future__ import annotations

import copy
import random

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from tests.engine.engines import assert_empty

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
    with cswap.install(net, min_bytes=0, fit=resident + 30_000) as handle:
        for n in range(N_STEPS):
            net.zero_grad(set_to_none=True)
            batch = torch.randn(18 if n % 7 == 0 else 16, 32)
            net(batch, numbers.choice([0, 0, 0, 1, 2, 3])).square().mean().backward()
        assert_empty(handle.engine)


class WithBuffer(nn.Module):
    """A linear layer, and a buffer of an odd kind."""

    def __init__(self, kind):
        super().__init__()
        self.layer = nn.Linear(32, 32)
        eye = torch.eye(32)
        if kind == "inference":
            with torch.inference_mode():
                eye = torch.eye(32)
        else:
            eye = eye.to_sparse() if kind == "coo" else getattr(eye, f"to_sparse_{kind}")()
        self.register_buffer("eye", eye)

    def forward(self, x):
        return functional.gelu(self.layer(x))


@pytest.mark.filterwarnings("ignore:Sparse")
@pytest.mark.parametrize("kind", ["coo", "csr", "csc", "inference"])
def test_a_goal_with_a_buffer_that_has_no_strides_or_versions(kind):
    model = WithBuffer(kind)
    with cswap.install(model, min_bytes=0, fit="64MiB") as handle:
        for _ in range(N_STEPS):
            model(torch.randn(64, 32)).square().mean().backward()
    assert handle.goal is not None
    assert handle.goal.resident_bytes > 2 * sum(p.nbytes for p in model.parameters())


@pytest.mark.filterwarnings("ignore:Lazy modules")
def test_a_goal_on_a_model_that_is_not_initialised_yet():
    model = nn.Sequential(nn.LazyLinear(32), nn.GELU(), nn.Linear(32, 4))
    with cswap.install(model, min_bytes=0, fit="64MiB") as handle:
        for _ in range(N_STEPS):
            model(torch.randn(64, 16)).square().mean().backward()
    assert handle.goal is not None
    assert handle.goal.resident_bytes >= 2 * sum(p.nbytes for p in model.parameters())


class Folded(nn.Module):
    """A convolution and its batch norm as one, by running statistics that it has just updated."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        mean, var = self.norm.running_mean, self.norm.running_var
        assert mean is not None
        assert var is not None
        with torch.no_grad():
            y = self.conv(x)
            mean.lerp_(y.mean((0, 2, 3)), 0.1)
            var.lerp_(y.var((0, 2, 3)), 0.1)
        scale = self.norm.weight * torch.rsqrt(var + self.norm.eps)
        weight = self.conv.weight * scale[:, None, None, None]
        y = functional.conv2d(x, weight, self.norm.bias - mean * scale, padding=1)
        return torch.relu_(y)


class InARow(nn.Module):
    """A convolution, its batch norm, and an activation in place."""

    def __init__(self):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)

    def forward(self, x):
        return torch.relu_(self.norm(self.conv(x)))


@pytest.mark.parametrize("block", [Folded, InARow])
def test_a_block_of_convolution_and_batch_norm_runs_once_in_a_step(block):
    torch.manual_seed(0)
    plain = nn.Sequential(*(block() for _ in range(4)), nn.Flatten(), nn.Linear(2048, 4))
    ours = copy.deepcopy(plain)
    optimizers = [torch.optim.SGD(model.parameters(), 0.01) for model in (plain, ours)]
    with cswap.install(ours, fit="min", slowdown=3.0, min_bytes=0) as handle:
        for _ in range(N_STEPS):
            x = torch.randn(8, 8, 16, 16)
            for model, optimizer in zip((plain, ours), optimizers, strict=True):
                optimizer.zero_grad()
                model(x).square().mean().backward()
                optimizer.step()
            found, wanted = (
                [*(p.grad for p in model.parameters()), *model.state_dict().values()]
                for model in (ours, plain)
            )
            assert all(map(torch.equal, found, wanted))
        assert handle.stats.swapped > 0
