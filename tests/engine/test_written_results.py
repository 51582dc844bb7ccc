"""A custom function's backward writes into the tensors that it saved; others have saved them, too.

Without cswap autograd refuses that. With it, each user gets the values that were saved, or the same
error.
"""

from __future__ import annotations

import gc
import random
from typing import TYPE_CHECKING

import pytest
import torch
from torch.nn import functional

import cswap
from tests.engine.engines import assert_empty
from tests.engine.looks import look_every

if TYPE_CHECKING:
    from collections.abc import Callable

pytestmark = pytest.mark.usefixtures("_chains_take_no_time", "by_price")

STEPS = 4


class Writing(torch.autograd.Function):
    """x @ w, whose backward writes into x."""

    @staticmethod
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w

    @staticmethod
    def backward(ctx, gradient):
        x, w = ctx.saved_tensors
        of_w = x.t() @ gradient
        x.mul_(3.0)
        return gradient @ w.t(), of_w


def product(x, w, *, write):
    return Writing.apply(x, w) if write else x @ w


def saved_twice(h, w, *, write):
    y = functional.gelu(h)
    return (y @ w).square().sum() + product(y, w, write=write).sum()


def saved_thrice(h, w, *, write):
    y = functional.gelu(h)
    first = sum((part @ w).square().sum() for part in (y, y.view(2, -1, 64)))
    return first + product(y, w, write=write).sum()


def an_input_of_another(h, w, *, write):
    # silu(y) is computed again from y, which waits for the product that writes into it.
    y = functional.gelu(h)
    first = (y @ w).square().sum()
    second = product(y, w, write=write).sum()
    return first + second + (functional.silu(y) @ w).sum()


def gradients(total, given, **options):
    """None: autograd has refused them, as it does without cswap."""
    try:
        return torch.autograd.grad(total, given, **options)
    except RuntimeError as error:
        if "modified by an inplace operation" not in str(error):
            raise
        return None


LOSSES = [saved_twice, saved_thrice, an_input_of_another]


@pytest.mark.parametrize("whole", [True, False], ids=["whole", "short"])
@pytest.mark.parametrize("options", [{}, {"codec": "zvc", "remat": False}], ids=["remat", "zvc"])
@pytest.mark.parametrize("loss", LOSSES)
def test_a_write_into_a_result_reaches_no_other_user(loss, options, whole, monkeypatch):
    if whole:
        look_every(monkeypatch, 1)
    given = [torch.randn(n, 64, requires_grad=True) for n in (512, 64)]
    wanted = torch.autograd.grad(loss(*given, write=False), given)
    with cswap.swapping(min_bytes=0, **options) as engine:
        for _ in range(STEPS):
            engine.begin_step()
            total = loss(*given, write=True)
            found = gradients(total, given)
            assert found is None or all(map(torch.equal, found, wanted))
            del total, found
            gc.collect()
        assert_empty(engine)


ACTIVATIONS: list[Callable[[torch.Tensor], torch.Tensor]] = [
    functional.gelu,
    functional.silu,
    torch.tanh,
    torch.relu,
    lambda x: functional.layer_norm(x, (64,)),
    lambda x: functional.gelu(x).view(2, -1, 64).reshape(-1, 64),
]


def random_loss(seed, h, w, *, write):
    """Some ten operators, several of which save the same tensors."""
    chance = random.Random(seed)
    values, outputs = [h * 1.0], []
    for _ in range(chance.randrange(3, 10)):
        x, other = chance.choice(values[-3:]), chance.choice(values)
        writes = chance.random() < 0.5
        kind = chance.randrange(len(ACTIVATIONS) + 4)
        if kind < len(ACTIVATIONS):
            y = ACTIVATIONS[kind](x)
        elif kind == len(ACTIVATIONS):
            y = functional.silu(x) * other
        elif kind == len(ACTIVATIONS) + 1:
            y = x + other
        else:
            y = product(x, w, write=write and writes) * 0.1
        values.append(y)
        if chance.random() < 0.5:
            outputs.append((y @ w).square().mean())
    return sum(outputs) + (values[-1] @ w).square().mean()


@pytest.mark.parametrize("options", [{}, {"codec": "zvc"}, {"codec": "raw"}], ids=str)
@pytest.mark.parametrize("seed", range(16))
def test_random_programs_whose_backward_writes(seed, options):
    torch.manual_seed(seed)
    given = [torch.randn(n, 64, requires_grad=True) for n in (256, 64)]
    wanted = torch.autograd.grad(random_loss(seed, *given, write=False), given)
    with cswap.swapping(min_bytes=0, **options) as engine:
        for step in range(STEPS):
            engine.begin_step()
            total = random_loss(seed, *given, write=True)
            found = gradients(total, given, retain_graph=step == 1)
            assert found is None or all(map(torch.equal, found, wanted))
