"""Modules whose forward runs again in backward, and those whose forward may not."""

from __future__ import annotations

import random
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

from cswap.fit.regions import RegionTimer
from cswap.recompute import Recomputed

N = 16


class Block(nn.Module):
    """Two layers; what it is given, and what it does beside, differs."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.drop = nn.Linear(N, N), nn.Linear(N, N), nn.Dropout(0.5)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(N))
        if kind == "generator":
            self.generator = torch.Generator().manual_seed(1)

    def forward(self, x: Any) -> Any:
        if self.kind == "dict":
            x["x"] = self.second(self.first(x["x"]).tanh()).exp().sin()
            return x
        if self.kind == "list":
            x = torch.cat(x, 1)[:, -N:]
        if self.kind == "in place":
            x = x.relu_()
        elif self.kind == "residual":
            x = x * 0.7  # does not save it
        elif self.kind == "buffer":
            self.mean = 0.9 * self.mean + 0.1 * x.detach().mean(0)
            x = x - self.mean
        elif self.kind == "python":
            x = x * random.random()
        elif self.kind == "numpy":
            x = x * float(np.random.rand())  # noqa: NPY002 - what programs use
        elif self.kind == "generator":
            x = x * torch.rand(N, generator=self.generator)
        elif self.kind == "transform":
            x = x + torch.func.grad(lambda y: y.square().sum())(x.detach())
        return self.drop(self.second(self.first(x).tanh()).exp().sin())


class Net(nn.Module):
    """Blocks, and how they are called."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.into, self.blocks = nn.Linear(N, N), nn.ModuleList([Block(kind) for _ in range(2)])

    def forward(self, x: Any) -> torch.Tensor:
        x = self.into(x)
        features = [x]
        if self.kind == "dict":
            x = {"x": x}
        for block in self.blocks:
            if self.kind == "list":
                features.append(block(features))
            elif self.kind == "keyword":
                x = block(x=x)
            elif self.kind == "residual":
                y = block(x)
                x += y
            else:
                x = block(x)
        if self.kind == "list":
            x = torch.cat(features, 1)
        result: torch.Tensor = x["x"] if self.kind == "dict" else x
        return result.square().mean()


def gradients(kind, meanwhile, *, again):
    torch.manual_seed(0)
    model = Net(kind)
    recomputed = Recomputed(model, ["blocks.0", "blocks.1"]) if again else None
    loss = meanwhile(model, torch.randn(8, N))
    loss.backward()
    if recomputed is not None:
        recomputed.remove()
    return [p.grad for p in model.parameters()]


def called(model, x):
    return model(x)


def with_other_weights(model, x):
    given = {name: p * 2 for name, p in model.named_parameters()}
    return functional_call(model, given, (x,))


def then_in_eval(model, x):
    loss = model(x)
    model.eval()
    return loss


def weights_changed(model, x):
    loss = model(x)
    with torch.no_grad():
        model.blocks[1].second.weight.mul_(1.5)
    return loss


@pytest.mark.parametrize("kind", ["plain", "dict", "list", "keyword"])
@pytest.mark.parametrize("meanwhile", [called, with_other_weights, then_in_eval])
def test_a_second_forward_is_given_what_the_first_one_was(kind, meanwhile):
    wanted = gradients(kind, meanwhile, again=False)
    for one, other in zip(gradients(kind, meanwhile, again=True), wanted, strict=True):
        assert torch.equal(one, other)


@pytest.mark.parametrize("again", [False, True])
def test_a_weight_that_was_modified_raises_as_without(again):
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients("plain", weights_changed, again=again)


def test_a_keyword_that_was_modified_raises():
    def modifies(model, x):
        x = model.into(x)
        loss = model.blocks[0](x=x).square().mean()
        with torch.no_grad():
            x.mul_(2)
        return loss

    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients("plain", modifies, again=True)


def without_hooks(model, x):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return model(x)


def by_transform(model, x):
    found, loss = torch.func.grad_and_value(lambda y: model(y))(x)
    return (found * found).sum().requires_grad_() + model(x) + loss.detach()


@pytest.mark.parametrize("meanwhile", [without_hooks, by_transform])
def test_where_hooks_are_disabled_a_forward_runs_once(meanwhile):
    wanted = gradients("plain", meanwhile, again=False)
    for one, other in zip(gradients("plain", meanwhile, again=True), wanted, strict=True):
        assert torch.equal(one, other)


NORMS = {
    "batch": lambda: nn.BatchNorm1d(N),
    "instance": lambda: nn.InstanceNorm1d(N, track_running_stats=True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_counts_a_batch_once(kind):
    found = []
    for paths in ([], ["0"]):
        torch.manual_seed(0)
        norm = NORMS[kind]()
        model = nn.Sequential(nn.Sequential(nn.Conv1d(N, N, 1), norm), nn.Conv1d(N, 1, 1))
        recomputed = Recomputed(model, paths)
        for _ in range(3):
            model(torch.randn(8, N, 4)).sum().backward()
        recomputed.remove()
        found.append((norm.running_mean, norm.running_var, norm.num_batches_tracked))
    for once, again in zip(*found, strict=True):
        assert torch.equal(once, again)


KINDS = {
    "plain": True,
    "dict": True,
    "list": True,
    "keyword": True,
    "residual": False,
    "in place": False,
    "buffer": False,
    "python": False,
    "numpy": False,
    "generator": False,
    "transform": False,
}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_do_more_than_compute_are_not_recomputed(kind):
    torch.manual_seed(0)
    model = Net(kind)
    chooser: Any = SimpleNamespace(step=SimpleNamespace(hooks_s=0.0), saved_at=lambda _: None)
    timer = RegionTimer(model, (), chooser)
    for _ in range(2):
        timer.begin_step()
        model(torch.randn(8, N)).backward()
    found = {region.path for region in timer.found()}
    timer.remove()
    assert ({"blocks.0", "blocks.1"} <= found) is KINDS[kind]
