"""Tensors that an engine computes again from values that other operators than their own save."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.advisor.live_costs import KEEP, REMAT
from cswap.engine.saved.values import SavedValues
from cswap.fit.solve import Found
from cswap.remat.reads import CAN_TELL
from tests.engine.engines import assert_empty
from tests.engine.test_again_slots import equal, gradients, leaves, swapping

pytestmark = pytest.mark.usefixtures("_chains_take_no_time", "no_limit")


def by_hand(h, w):
    """The cube saves ``x``, and the product of which 0.5 * x is a factor is computed from it."""
    x = h @ w
    return (0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * torch.pow(x, 3.0))))).sum()


def residual(h, w):
    """The norm saves ``x``, and a product the sum of ``x`` and an activation."""
    x = h @ w
    y = x + functional.gelu(functional.layer_norm(x, (64,)))
    return (y @ w).square().sum()


def of_views(h, w):
    """The same through views, of the value and of the result."""
    x = (h @ w).view(8, 64, 64)
    y = functional.gelu(functional.layer_norm(x, (64,))) + x.transpose(1, 2)
    return (y.contiguous().view(-1, 64) @ w).square().sum()


LOSSES = pytest.mark.parametrize("loss", [by_hand, residual, of_views])


@pytest.fixture
def values(monkeypatch):
    """Per question for the object that holds a node's result: whether there was one."""
    found, of = [], SavedValues.of

    def noted(self, notes):
        packed = of(self, notes)
        found.append(packed is not None)
        return packed

    monkeypatch.setattr(SavedValues, "of", noted)
    return found


@LOSSES
def test_slots_find_the_values_in_each_step(loss, taken, values):
    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    with swapping() as engine:
        gradients(engine, loss, given)
        again = engine.stats.by_codec["remat"].count
        for n in range(2, 6):
            values.clear()
            assert equal(gradients(engine, loss, given), wanted)
            assert True in values
            assert engine.stats.by_codec["remat"].count == n * again
        assert taken
        assert all(taken)
        assert engine.stats.fallbacks == 0
        assert_empty(engine)


@LOSSES
def test_without_the_values_the_tensors_are_stored(loss, monkeypatch):
    found = []
    for there in (True, False):
        if not there:
            monkeypatch.setattr(SavedValues, "note", lambda *_: None)
        given = leaves()
        with swapping() as engine:
            gradients(engine, loss, given)
            remat = engine.stats.by_codec.get("remat")
            found.append(0 if remat is None else remat.count)
    assert found[0] == found[1] + 1


@LOSSES
def test_a_graph_that_is_dropped_leaves_nothing(loss):
    given = leaves()
    with swapping() as engine:
        for _ in range(4):
            engine.begin_step()
            loss(*given)  # and no backward
        engine.collect()
        assert_empty(engine)


def test_a_tensor_stays_right_when_nobody_saves_the_value_any_more(taken):
    saves = True

    def loss(h, w):
        x = h @ w
        part = functional.layer_norm(x, (64,)) if saves else x.cumsum(0)
        return ((x + functional.gelu(part)) @ w).square().sum()

    given, wanted = leaves(), {}
    for saves in (True, False):
        wanted[saves] = torch.autograd.grad(loss(*given), given)
    with swapping() as engine:
        for saves in (True, True, True, False, False, True, True):
            assert equal(gradients(engine, loss, given), wanted[saves])
        assert_empty(engine)
    assert True in taken


class Value(nn.Module):
    """Its norm saves a tensor, of which another module makes a sum."""

    def forward(self, x):
        y = x.cumsum(0)
        return y, functional.layer_norm(y, (64,))


class Sum(nn.Module):
    def forward(self, pair):
        return functional.layer_norm(pair[0] + torch.tanh(pair[1]), (64,))


def net():
    torch.manual_seed(0)
    linears = [nn.Linear(64, 64) for _ in range(6)]
    return nn.Sequential(*linears[:3], Value(), Sum(), *linears[3:])


def keep_all_else(problem, *_goal):
    """The plan that computes again whatever it can, and keeps the other tensors."""
    ways = {
        i: max(one.ways, key=lambda way: (way.action == REMAT, way.action == KEEP))
        for i, one in enumerate(problem.saved)
    }
    return Found(problem.plan(ways))


@pytest.mark.skipif(not CAN_TELL, reason="needs torch 2.11")
@pytest.mark.parametrize("stays", [False, True])
def test_modules_whose_values_others_need_are_not_quiet(stays, monkeypatch):
    if stays:
        monkeypatch.setattr("cswap.fit.controller.found_for", keep_all_else)
    monkeypatch.setattr("cswap.quiet_modules.spans.LEAST_TENSORS", 1)
    model, plain = net(), net()
    nbytes = 512 * 64 * 4
    handle = cswap.install(model, fit="min", min_bytes=nbytes, workers=0, slowdown=50.0)
    counts = []
    for n in range(60):
        x = torch.randn(512, 64, generator=torch.Generator().manual_seed(n))
        for one in (model, plain):
            one.zero_grad()
            one(x).square().mean().backward()
        pairs = zip(model.parameters(), plain.parameters(), strict=True)
        assert all(torch.equal(a.grad, b.grad) for a, b in pairs)
        counts.append(handle.stats.by_codec["remat"].count)
    goal: Any = handle.goal
    assert (set(goal.actions) == {"keep", "remat"}) == stays
    each = counts[-1] - counts[-2]
    assert each == goal.actions["remat"]
    assert counts[-1] - counts[-30] == 29 * each
    handle.remove()
