"""Chains that differ from the tensor at one place, and equal ones that come to trusted places.

The model writes into the result of one of two equal chains behind autograd's back. Only a trial at
the tensor's own place can tell them apart.
"""

from __future__ import annotations

import copy
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.engine.trials import Trials

ALL: Any = {"min_bytes": 0, "slowdown": 1e6}


class Branch(nn.Module):
    """A product and a relu; it may write into the result of the product."""

    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.randn(64, 64))
        self.into, self.out = nn.Linear(64, 64), nn.Linear(64, 64)

    def branch(self, h, writes):
        z = h * self.scale
        if writes:
            with torch.no_grad():
                z[:, ::2] = 0
        return self.out(functional.relu(z))

    def forward(self, x, writes):
        return self.branch(self.into(x), writes)


class Dropped(nn.Module):
    """Layers that may be left out, in front of both branches."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64)) for _ in range(4)
        )
        self.branches = Branch()

    def forward(self, x, left_out, n_sines):
        for i, layer in enumerate(self.layers):
            x = x if i in left_out else x + layer(x)
        for _ in range(n_sines):
            x = x.sin()
        h = self.branches.into(x)
        return self.branches.branch(h, False) + self.branches.branch(h, True)


def twins(kind):
    torch.manual_seed(0)
    plain = kind()
    return plain, copy.deepcopy(plain)


def are_equal(plain, model):
    pairs = zip(plain.parameters(), model.parameters(), strict=True)
    return all((a.grad is None and b.grad is None) or torch.equal(a.grad, b.grad) for a, b in pairs)


def each_step_is_equal(plain, model, steps, loss):
    for n, step in enumerate(steps):
        x = torch.randn(64, 64, generator=torch.Generator().manual_seed(n))
        for one in (plain, model):
            one.zero_grad()
            loss(one, x, step).backward()
        assert are_equal(plain, model), n


ALL_LAYERS: tuple[tuple[int, ...], int] = ((), 0)


@pytest.mark.parametrize("n_sines", [0, 1, 2, 3])
@pytest.mark.parametrize(
    "order",
    [
        [((0,), 1)] * 3 + [ALL_LAYERS] * 3,
        [ALL_LAYERS] * 3 + [((0,), 1)] * 3,
        [ALL_LAYERS, ((0,), 1), ((1, 2), 0), ((3,), 1)] * 3,
    ],
    ids=["grows", "shrinks", "alternates"],
)
def test_a_sequence_that_shifts_brings_no_chain_to_the_place_of_another(order, n_sines):
    plain, model = twins(Dropped)
    steps = [(left_out, n_sines * more) for left_out, more in order]
    with cswap.install(model, **ALL) as handle:
        each_step_is_equal(plain, model, steps, lambda one, x, step: one(x, *step).square().mean())
        assert handle.stats.by_codec["remat"].count > 0


def test_so_with_a_goal():
    plain, model = twins(Dropped)
    steps = [ALL_LAYERS] * 20 + [((0,), 0)] * 4 + [ALL_LAYERS] * 3 + [((1,), 0)] * 20
    with cswap.install(model, fit="min", slowdown=50.0, min_bytes=0):
        each_step_is_equal(plain, model, steps, lambda one, x, step: one(x, *step).square().mean())


@pytest.mark.parametrize("same", [True, False])
@pytest.mark.parametrize("writes", [(False, True), (True, False), (False, False, True)])
def test_calls_before_a_backward_are_tried_apart(writes, same):
    plain, model = twins(Branch)

    def loss(one, x, _):
        inputs = [x if same else x + n for n in range(len(writes))]
        return sum(one(*pair).square().mean() for pair in zip(inputs, writes, strict=True))

    with cswap.install(model, **ALL):
        each_step_is_equal(plain, model, range(4), loss)


def test_threads_are_tried_apart():
    plain, model = twins(Branch)
    swapping = cswap.swapping(**ALL)

    def loss(one, x, _):
        found = {}

        def run(writes):
            if one is plain:
                found[writes] = one(x, writes)
            else:
                with swapping:
                    found[writes] = one(x, writes)

        run(False)
        thread = threading.Thread(target=run, args=(True,))
        thread.start()
        thread.join()
        return found[False].square().mean() + found[True].square().mean()

    each_step_is_equal(plain, model, range(4), loss)


def test_a_chain_that_could_not_run_says_nothing_of_others(monkeypatch):
    bring: Any = Trials.__init__
    failed: list[Any] = []

    def fails_once(self, counters, bring_inputs):
        def brought(remat):
            if not failed:
                failed.append(remat)
                raise RuntimeError("no memory")
            return bring_inputs(remat)

        bring(self, counters, brought)

    monkeypatch.setattr(Trials, "__init__", fails_once)

    class Two(nn.Module):
        def __init__(self):
            super().__init__()
            self.branch = Branch()

        def forward(self, x):
            return self.branch(self.branch(x, False), False)

    model = Two()  # two equal chains in one module
    with cswap.install(model, **ALL) as handle:
        model(torch.randn(64, 64)).square().mean().backward()
        assert failed
        assert handle.stats.by_codec["remat"].count > 0
