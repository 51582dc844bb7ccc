"""Tensors that stay take few calls, and are what they were (`Replay.pack`)."""

from __future__ import annotations

import sys
from collections import Counter
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.engine.packer import Packer

STEPS = 24
WIDTH, ROWS = 64, 512


class Net(nn.Module):
    """Saves weights, casts of weights, small tensors and large ones."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(0)
        self.body = nn.Sequential(
            nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.Sigmoid()
        )
        self.small = nn.Linear(4, 4)

    def forward(self, x):
        return self.body(x).sum() + self.small(x[:2, :4]).square().sum()


def step(net, x, dtype=None):
    net.zero_grad(set_to_none=True)
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype is not None):
        loss = net(x)
    loss.backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.fixture
def general(monkeypatch):
    """Numbers of elements of the tensors that went the general way."""
    found, pack = [], Packer.pack

    def noted(packer, tensor):
        found.append(tensor.numel())
        return pack(packer, tensor)

    monkeypatch.setattr(Packer, "pack", noted)
    return found


@contextmanager
def calls_counted():
    """The Python functions of cswap that are called, by name."""
    found = []

    def note(frame, event, _argument):
        if event == "call" and "cswap/engine" in frame.f_code.co_filename:
            found.append(frame.f_code.co_name)

    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def test_a_tensor_that_stays_takes_a_call_in_each_hook(general):
    net: Any = Net()
    x = torch.randn(ROWS, WIDTH)
    with cswap.install(net, fit=1 << 40, min_bytes=1024) as handle:
        for _ in range(STEPS):
            step(net, x)
        goal: Any = handle.goal
        assert set(goal.actions) == {"keep"}
        engine = handle.engine
        engine.begin_step()
        engine._replay.review()
        general.clear()
        weight, small = net.body[0].weight, torch.ones(4, requires_grad=True).exp()
        for tensor in (weight, weight.t(), small):
            with calls_counted() as calls:
                packed: Any = engine.pack(tensor)
            assert calls == ["pack"]
            assert packed.tensor.data_ptr() == tensor.data_ptr()
            assert not packed.tensor.requires_grad or packed.tensor.is_leaf
            with calls_counted() as calls:
                engine._state.backward_is_next = False
                assert torch.equal(engine.unpack(packed), tensor)
            assert calls == ["unpack"]
        assert not general


@pytest.mark.parametrize("dtype", [None, pytest.param(torch.bfloat16, marks=pytest.mark.slow)])
def test_gradients_and_counts_are_those_of_the_general_way(monkeypatch, general, dtype):
    x = torch.randn(ROWS, WIDTH)

    def trained(*, inline):
        net, seen = Net(), []
        with cswap.install(net, fit=1 << 40, min_bytes=1024) as handle:
            if not inline:
                monkeypatch.setattr("cswap.engine.replay.replay.Replay._is_special", _yes)
            for n in range(2 * STEPS):
                if n == STEPS:  # the plan is obeyed
                    before = _counts(handle.stats)
                general.clear()
                seen.append((step(net, x, dtype), len(general)))
            after = _counts(handle.stats)
        return seen, after - before

    mine, counts = trained(inline=True)
    general_way, general_counts = trained(inline=False)
    for (a, _), (b, _) in zip(mine, general_way, strict=True):
        assert all(map(torch.equal, a, b))
    assert counts == general_counts
    assert mine[0][1] == general_way[-1][1] > mine[-2][1]  # or nothing was tried


def _yes(_replay):
    return True


def _counts(stats):
    names = "kept_by_reason", "kept_bytes_by_reason"
    found = Counter({(n, why): k for n in names for why, k in getattr(stats, n).items()})
    found["packed", ""] = stats.packed
    return found


def test_other_tensors_at_the_places_of_those_that_stay_are_seen(general):
    net, plain = Net(), Net()
    with cswap.install(net, fit=1 << 40, min_bytes=1024) as handle:
        for n in range(2 * STEPS):
            rows = ROWS // 2 if STEPS <= n < STEPS + 4 else ROWS
            x = torch.randn(rows, WIDTH)
            general.clear()
            assert all(map(torch.equal, step(net, x), step(plain, x)))
            if n == STEPS:
                assert general.count(rows * WIDTH) > 1
        assert handle.stats.fallbacks == 0


def test_a_tensor_that_stays_is_not_to_be_modified():
    net: Any = Net()
    x = torch.randn(ROWS, WIDTH)
    with cswap.install(net, fit=1 << 40, min_bytes=1024):
        for _ in range(STEPS):
            step(net, x)
        loss = net(x)
        with torch.no_grad():
            net.body[2].weight.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
