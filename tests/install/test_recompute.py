"""Modules that the user names to run again in backward, and those whose forward may not."""

from __future__ import annotations

import copy
import random
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.func import functional_call

import cswap
from cswap.errors import ConfigError

N = 16


class Block(nn.Module):
    """Two layers; arguments and side effects differ by kind."""

    def __init__(self, kind: str = "plain") -> None:
        super().__init__()
        self.kind = kind
        self.first, self.second, self.drop = nn.Linear(N, N), nn.Linear(N, N), nn.Dropout(0.5)
        self.mean: torch.Tensor
        self.register_buffer("mean", torch.zeros(N))
        self.calls, self.seen = 0, {"largest": [0.0]}
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
        elif self.kind == "python":
            x = x * random.random()
        elif self.kind == "numpy":
            x = x * float(np.random.rand())  # noqa: NPY002 - what programs use
        elif self.kind in WRITES:
            x = WRITES[self.kind](self, x)
        return self.drop(self.second(self.first(x).tanh()).exp().sin())


def writes_buffer(block, x):
    block.mean = 0.9 * block.mean + 0.1 * x.detach().mean(0)
    return x - block.mean


def writes_behind_autograd(block, x):
    block.mean.data.copy_(x.detach().mean(0))  # the buffer's version does not change
    return x - block.mean


def writes_attribute(block, x):
    block.calls += 1
    return x * block.calls


def writes_nested(block, x):
    block.seen["largest"][0] = max(block.seen["largest"][0], float(x.detach().max()))
    return x / block.seen["largest"][0]


def registers(block, x):
    if not hasattr(block, "late"):
        block.register_buffer("late", torch.ones(N))
    return x * block.late


def draws(block, x):
    return x * torch.rand(N, generator=block.generator)


WRITES = {
    "buffer": writes_buffer,
    "data": writes_behind_autograd,
    "attribute": writes_attribute,
    "nested": writes_nested,
    "late": registers,
    "generator": draws,
}

REFUSED = {
    "buffer": "buffer mean",
    "data": "buffer mean",
    "attribute": "attribute calls",
    "nested": "attribute seen",
    "late": "buffer late",
    "generator": "attribute generator",
}


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
            else:
                x = block(x)
        if self.kind == "list":
            x = torch.cat(features, 1)
        result: torch.Tensor = x["x"] if self.kind == "dict" else x
        return result.square().mean()


def gradients(kind, meanwhile, *, again):
    torch.manual_seed(0)
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002
    model = Net(kind)
    handle = cswap.install(model, recompute="blocks.*", min_bytes=0) if again else None
    loss = meanwhile(model, torch.randn(8, N))
    loss.backward()
    if handle is not None:
        handle.remove()
    return [p.grad for p in model.parameters()], random.getstate(), np.random.rand()  # noqa: NPY002


def called(model, x):
    return model(x)


def with_other_weights(model, x):
    given = {name: p * 2 for name, p in model.named_parameters()}
    return functional_call(model, given, (x,))


def then_in_eval(model, x):
    loss = model(x)
    model.eval()
    return loss


def frozen_meanwhile(model, x):
    loss = model(x)
    for p in model.blocks.parameters():
        p.requires_grad_(False)
    return loss


def weights_changed(model, x):
    loss = model(x)
    with torch.no_grad():
        model.blocks[1].second.weight.mul_(1.5)
    return loss


@pytest.mark.parametrize("kind", ["plain", "dict", "list", "keyword", "python", "numpy"])
@pytest.mark.parametrize("meanwhile", [called, with_other_weights, then_in_eval, frozen_meanwhile])
def test_a_second_forward_is_given_what_the_first_one_was(kind, meanwhile):
    wanted, *states = gradients(kind, meanwhile, again=False)
    found, *states_again = gradients(kind, meanwhile, again=True)
    for one, other in zip(found, wanted, strict=True):
        assert other is None if one is None else torch.equal(one, other)
    assert states == states_again


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


def test_a_module_that_modifies_its_input_raises_as_with_checkpointing():
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        gradients("in place", called, again=True)


@pytest.mark.parametrize("kind", REFUSED)
def test_a_module_that_writes_its_state_is_refused_by_name(kind):
    torch.manual_seed(0)
    model = Net(kind)
    words = f"module 'blocks.0' changes its {REFUSED[kind]}, "
    with cswap.install(model, recompute="blocks.*"), pytest.raises(ConfigError, match=words):
        model(torch.randn(8, N))
    model(torch.randn(8, N)).backward()  # as without cswap


def without_hooks(model, x):
    with torch.autograd.graph.disable_saved_tensors_hooks("not here"):
        return model(x)


def by_transform(model, x):
    found, loss = torch.func.grad_and_value(lambda y: model(y))(x)
    return (found * found).sum().requires_grad_() + model(x) + loss.detach()


@pytest.mark.parametrize("meanwhile", [without_hooks, by_transform])
def test_where_hooks_are_disabled_a_forward_runs_once(meanwhile):
    wanted, *_ = gradients("plain", meanwhile, again=False)
    found, *_ = gradients("plain", meanwhile, again=True)
    assert all(map(torch.equal, found, wanted))


NORMS = {
    "batch": lambda: nn.BatchNorm1d(N),
    "instance": lambda: nn.InstanceNorm1d(N, track_running_stats=True),
}


@pytest.mark.parametrize("kind", NORMS)
def test_a_norm_counts_a_batch_once(kind):
    found = []
    for again in (False, True):
        torch.manual_seed(0)
        norm = NORMS[kind]()
        model = nn.Sequential(nn.Sequential(nn.Conv1d(N, N, 1), norm), nn.Conv1d(N, 1, 1))
        handle = cswap.install(model, recompute="0") if again else None
        for _ in range(3):
            model(torch.randn(8, N, 4)).sum().backward()
        if handle is not None:
            handle.remove()
        found.append((norm.running_mean, norm.running_var, norm.num_batches_tracked))
    for once, again in zip(*found, strict=True):
        assert torch.equal(once, again)


class Fused(nn.Module):
    """Reads a norm's statistics before the norm writes them, as quantised training does."""

    def __init__(self):
        super().__init__()
        self.body = nn.Sequential(nn.Linear(N, 4 * N), nn.GELU(), nn.Linear(4 * N, N))
        self.norm = nn.BatchNorm1d(N)

    def forward(self, x):
        variance = self.norm.running_var
        assert variance is not None
        scale = self.norm.weight / (variance + 1e-5).sqrt()
        return x + self.norm(self.body(x * scale) / scale)


class Same(nn.Module):
    """Takes a branch by the identity of its arguments, within containers and by keyword."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(N, N)

    def forward(self, a, b, *, others):
        y = self.linear(a)
        y = torch.relu(y) * b if a is b else torch.tanh(y).sin() * b
        return y.exp() * others[0] if others[0] is b else y.sin().cos() * others[0]


class Calls(nn.Module):
    def __init__(self, *, same):
        super().__init__()
        self.inner = Same()
        self.same = same

    def forward(self, x):
        y = x.sin()
        z = y if self.same else y * 1.0
        return self.inner(y, z, others=[y if self.same else z])


MODELS: dict[str, Any] = {
    "fused norm": (lambda: nn.Sequential(Fused(), Fused(), nn.Linear(N, 1)), "[01]"),
    "one object": (lambda: nn.Sequential(Calls(same=True), Calls(same=False)), Same),
    "attention": (
        lambda: nn.TransformerEncoder(
            nn.TransformerEncoderLayer(N, 2, 2 * N, batch_first=True), 2, enable_nested_tensor=False
        ),
        "layers.*.self_attn",
    ),
}
"""Models, and the modules of them that may be recomputed."""


@pytest.mark.sampled
@pytest.mark.parametrize("kind", MODELS)
@pytest.mark.parametrize("goal", [False, True])
@pytest.mark.parametrize("named", [False, True])
def test_modules_with_state_and_arguments_that_are_one_object(kind, goal, named):
    torch.manual_seed(0)
    make, recompute = MODELS[kind]
    plain = make()
    ours = copy.deepcopy(plain)
    options: dict[str, Any] = {"fit": "min", "slowdown": 30.0} if goal else {}
    with cswap.install(ours, min_bytes=0, recompute=recompute if named else (), **options):
        for n in range(10):
            x = torch.randn(8, 6, N) if kind == "attention" else torch.randn(64, N)
            found = []
            for model in (plain, ours):
                torch.manual_seed(n)
                model.zero_grad()
                model(x).square().mean().backward()
                found.append([p.grad for p in model.parameters()] + list(model.buffers()))
            assert all(map(torch.equal, *found)), n


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"recompute": "nowhere.*"}, "recompute='nowhere.*': selects no submodule"),
        ({"recompute": nn.Conv2d}, "recompute='Conv2d': selects no submodule"),
        ({"recompute": "0", "plan": {}}, "with plan: a plan says what is recomputed"),
        ({"recompute": 3}, "must be module classes, path globs"),
    ],
)
def test_wrong_words_are_refused_before_anything_changes(options, words):
    model = nn.Sequential(nn.Linear(N, N), nn.ReLU())
    before = [dict(vars(m)) for m in model.modules()]
    with pytest.raises(ConfigError) as error:
        cswap.install(model, **options)
    assert words in str(error.value)
    assert [dict(vars(m)) for m in model.modules()] == before


def test_modules_are_recomputed_in_a_model_only():
    with pytest.raises(ConfigError, match="needs a model"):
        cswap.install(recompute="0")


def test_the_outermost_modules_are_recomputed_and_hold_less():
    swapped = []
    for recompute in ((), "*"):
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Sequential(nn.Linear(N, N), nn.GELU()) for _ in range(4)))
        with cswap.install(model, recompute=recompute, codec="raw", min_bytes=0) as handle:
            wrapped = [name for name, m in model.named_modules() if "forward" in vars(m) and name]
            assert wrapped == (["0", "1", "2", "3"] if recompute else [])
            x = torch.randn(512, N)
            out = model(x)
            swapped.append(handle.stats.raw_bytes // x.nbytes)
            out.sum().backward()
            copied = copy.deepcopy(model)
            assert not any("forward" in vars(m) for m in copied.modules())
        assert not any("forward" in vars(m) for m in model.modules())
    assert swapped == [8, 4]
