"""Where hooks are disabled, as inside of `torch.func.grad`, a program runs as without cswap."""

from __future__ import annotations

import contextlib
import itertools
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu
from torch.func import functional_call

import cswap
from cswap import hook_stack

MESSAGE = "not here"
ALL: dict[str, Any] = {"min_bytes": 0, "codec": "zvc"}
WIDTH = 16


class Inside(nn.Module):
    """A model that disables hooks, or differentiates by a transform, in its forward."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.fails = kind, False
        self.first, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.middle = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.GELU(), nn.Linear(WIDTH, WIDTH))

    def forward(self, x):
        """Args: x: [n, WIDTH]."""
        y = torch.tanh(self.first(x))
        if self.kind == "disables":
            with disable_saved_tensors_hooks(MESSAGE):
                y = self._middle(y)
        else:
            y = y + torch.func.grad(lambda t: self._middle(t).square().sum())(y)
        return self.last(torch.relu(y))

    def _middle(self, y):
        y = self.middle(y)
        if self.fails:
            raise ValueError("inside")
        return y


def two(make):
    """The same model twice."""
    torch.manual_seed(0)
    plain = make()
    mine = make()
    mine.load_state_dict(plain.state_dict())
    return plain, mine


def small():
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH))


def gradients(model, x):
    model.zero_grad()
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def by_default(model):
    return cswap.install(model)


def by_codec(model):
    return cswap.install(model, **ALL)


def by_goal(model):
    return cswap.install(model, fit="min", min_bytes=0)


def lossy(model):
    return cswap.install(model, lossy="int8", min_bytes=0, guard_every=2)


def everywhere(_model):
    return cswap.install(**ALL)


def swapping(_model):
    return cswap.swapping(**ALL)


WAYS = [by_default, by_codec, by_goal, everywhere, swapping]


def grad(f, x):
    return torch.func.grad(lambda t: f(t).square().sum())(x)


def vjp(f, x):
    found = torch.func.vjp(f, x)
    return torch.cat([found[0].flatten(), found[1](torch.ones_like(found[0]))[0].flatten()])


def of_parameters(model, x):
    found = torch.func.grad(lambda p: functional_call(model, p, (x,)).square().sum())(
        dict(model.named_parameters())
    )
    return torch.cat([g.flatten() for g in found.values()])


def per_sample(model, x):
    parameters = {name: p.detach() for name, p in model.named_parameters()}
    one = torch.func.grad(lambda p, row: functional_call(model, p, (row,)).square().sum())
    found = torch.vmap(one, in_dims=(None, 0))(parameters, x)
    return torch.cat([g.flatten() for g in found.values()])


TRANSFORMS = {
    "grad": grad,
    "vjp": vjp,
    "jacrev": lambda f, x: torch.func.jacrev(f)(x),
    "hessian": lambda f, x: torch.func.hessian(lambda t: f(t).sum())(x),
    "jacfwd": lambda f, x: torch.func.jacfwd(f)(x),
    "jvp": lambda f, x: torch.func.jvp(f, (x,), (torch.ones_like(x),))[1],
    "of parameters": of_parameters,
    "per sample": per_sample,
}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize("way", [*WAYS, lossy])
@pytest.mark.parametrize("name", TRANSFORMS)
def test_transforms_of_a_model_give_the_plain_bits(name, way):
    plain, mine = two(small)
    x = torch.randn(4, WIDTH)
    wanted, step = TRANSFORMS[name](plain, x), gradients(plain, x)
    with way(mine):
        before = hook_stack.top(True)
        for _ in range(2):
            assert torch.equal(TRANSFORMS[name](mine, x), wanted)
            assert hook_stack.top(True) == before
            found = gradients(mine, x)
            assert way is lossy or all(map(torch.equal, found, step))
    assert hook_stack.top(True) is None


@pytest.mark.parametrize("way", WAYS)
def test_a_model_inside_of_a_region_without_hooks(way):
    plain, mine = two(small)
    x = torch.randn(256, WIDTH)
    wanted = gradients(plain, x)
    with way(mine):
        before = hook_stack.top(True)
        for _ in range(3):
            with disable_saved_tensors_hooks(MESSAGE):
                assert all(map(torch.equal, gradients(mine, x), wanted))
                with pytest.raises(RuntimeError, match=MESSAGE), save_on_cpu():
                    pass
            assert hook_stack.top(True) == before
            assert all(map(torch.equal, gradients(mine, x), wanted))
    assert hook_stack.top(True) is None


@pytest.mark.sampled
@pytest.mark.parametrize("kind", ["disables", "differentiates"])
@pytest.mark.parametrize("way", WAYS)
def test_regions_inside_of_a_model_for_many_steps(way, kind):
    plain, mine = two(lambda: Inside(kind))
    inputs = [torch.randn(n, WIDTH) for n in (256, 256, 128)]
    wanted = [gradients(plain, x) for x in inputs]
    with way(mine):
        before = hook_stack.top(True)
        for n in range(24):
            step = (n // 8) % 3
            if n % 8 == 5:
                mine.fails = True
                with pytest.raises(ValueError, match="inside"):
                    mine(inputs[step])
                mine.fails = False
            assert all(map(torch.equal, gradients(mine, inputs[step]), wanted[step]))
            assert hook_stack.top(True) == before
    assert hook_stack.top(True) is None


@pytest.mark.parametrize("way", [by_codec, everywhere, swapping])
@pytest.mark.parametrize("kind", ["disables", "differentiates"])
def test_what_is_saved_around_a_region_is_swapped_in_every_step(kind, way):
    torch.manual_seed(0)
    model, x = Inside(kind), torch.randn(256, WIDTH)
    counts = [0]
    with way(model) as found:
        for _ in range(4):
            gradients(model, x)
            counts.append(getattr(found, "engine", found).stats.swapped)
    steps = [later - earlier for earlier, later in itertools.pairwise(counts)]
    assert min(steps) == max(steps) > 0


class Widens(nn.Module):
    """Small modules, then a large one. It disables hooks from the one into the other if told to."""

    def __init__(self):
        super().__init__()
        self.small = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(6)))
        self.large, self.last = nn.Linear(WIDTH, 4096), nn.Linear(4096, 1)
        self.disables = False

    def forward(self, x):
        """Args: x: [n, WIDTH]."""
        y = self.small[0](x)
        with disable_saved_tensors_hooks(MESSAGE) if self.disables else contextlib.nullcontext():
            for module in self.small[1:].children():
                y = module(y)
            y = torch.relu(self.large(y))
        return self.last(torch.relu(y))


def test_a_region_inside_of_some_calls_of_a_model():
    plain, mine = two(Widens)
    x = torch.randn(16, WIDTH)
    wanted, counts = gradients(plain, x), [0]
    with cswap.install(mine, codec="zvc", min_bytes=1 << 16) as handle:
        for n in range(12):
            mine.disables = n in (8, 9)
            assert all(map(torch.equal, gradients(mine, x), wanted))
            assert hook_stack.top(True) is None
            counts.append(handle.stats.swapped)
    steps = [later - earlier for earlier, later in itertools.pairwise(counts)]
    assert steps[7] == steps[10] == steps[11] > 0
    assert min(steps[8:10]) > 0


def test_hooks_that_were_put_on_in_a_region_begin_where_it_ends():
    plain, mine = two(small)
    x = torch.randn(256, WIDTH)
    wanted = gradients(plain, x)
    with disable_saved_tensors_hooks(MESSAGE):
        handle = cswap.install(**ALL)
        assert all(map(torch.equal, gradients(mine, x), wanted))
        assert handle.stats.packed == 0
    assert all(map(torch.equal, gradients(mine, x), wanted))
    assert handle.stats.swapped > 0
    with disable_saved_tensors_hooks(MESSAGE):
        handle.remove()
    assert hook_stack.top(True) is None


def test_hooks_that_end_in_a_region_do_not_come_back():
    with contextlib.ExitStack() as region:
        with cswap.swapping(**ALL):
            region.enter_context(disable_saved_tensors_hooks(MESSAGE))
        assert hook_stack.top(True) is None
    assert hook_stack.top(True) is None


def test_several_engines_come_back_in_order():
    x = torch.randn(256, WIDTH, requires_grad=True)
    with cswap.swapping(**ALL) as outer, cswap.swapping(**ALL) as inner:
        before = hook_stack.top(True)
        with disable_saved_tensors_hooks(MESSAGE), disable_saved_tensors_hooks("nor here"):
            x.exp().sum().backward()
        assert hook_stack.top(True) == before
        x.exp().sum().backward()
        assert (outer.stats.packed, inner.stats.packed) == (0, 1)
    assert hook_stack.top(True) is None


@pytest.mark.parametrize("order", ["theirs outside", "theirs inside"])
def test_hooks_of_others_are_refused_as_without_cswap(order):
    x = torch.randn(256, WIDTH, requires_grad=True)
    ours, theirs = cswap.swapping(**ALL), save_on_cpu()
    pair = (theirs, ours) if order == "theirs outside" else (ours, theirs)
    with pair[0], pair[1]:
        before = hook_stack.top(True)
        with pytest.raises(RuntimeError, match=MESSAGE), disable_saved_tensors_hooks(MESSAGE):
            pass
        assert hook_stack.top(True) == before
        (gradient,) = torch.autograd.grad(x.exp().sum(), x)
    assert hook_stack.top(True) is None
    assert torch.equal(gradient, x.detach().exp())
