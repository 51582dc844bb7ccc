"""Calls of several kinds, and steps without positions: tensors that could leave are found again."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from cswap.engine.order.looks import EVERY
from cswap.quiet_modules.recording import Boundary, Event, Record
from cswap.quiet_modules.spans import lay_out

N_LARGE = 1 << 18


class Zeros(nn.Module):
    """Saves large tensors that compress, if it is large."""

    large = False

    def __init__(self):
        super().__init__()
        self.linear, self.weight = nn.Linear(8, 8), nn.Parameter(torch.zeros(1))

    def forward(self, x):
        y = self.linear(x).tanh().sigmoid().tanh().sum()
        if self.large:
            z = torch.zeros(N_LARGE) * self.weight
            for _ in range(4):
                z = z.tanh()
            y = y + z.sum()
        return y


def swapped_by(handle, model, x):
    before = handle.stats.swapped
    model(x).sum().backward()
    return handle.stats.swapped - before


@pytest.fixture(autouse=True)
def _priced(by_price):
    pass


def test_a_model_that_saved_small_tensors_alone_is_recorded_again(install):
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 8), Zeros())
    handle = install(model, remat=False)
    for _ in range(10):
        assert not swapped_by(handle, model, torch.randn(4, 8))
    model[3].large = True
    found = [swapped_by(handle, model, torch.randn(4, 8)) for _ in range(2 * EVERY)]
    assert min(found[EVERY:]) >= 4


@pytest.mark.parametrize("period", [2, 8])
def test_spans_are_those_of_the_kind_of_call_that_comes(install, packs, period):
    class Scaled(nn.Module):
        def __init__(self):
            super().__init__()
            self.layers = nn.Sequential(*(nn.Tanh() for _ in range(8)))
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, x):
            return self.layers(x * self.weight)

    model = Scaled()
    handle, found = install(model, remat=False), []
    for n in range(3 * EVERY):  # noise, which stays, and zeros
        large = n % period == period - 1
        x = torch.zeros(N_LARGE) if large else torch.randn(1 << 14)
        found += [swapped_by(handle, model, x)] if large else []
        if not large:
            swapped_by(handle, model, x)
    assert min(found[1:]) >= 7


def test_a_kind_of_call_with_an_even_period_is_recorded_again(install):
    model: Any = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), Zeros())
    handle, found = install(model, remat=False), []
    for n in range(4 * EVERY):
        if n == 10:
            model[2].large = True
        rows = 4 if n % 2 else 6
        swapped = swapped_by(handle, model, torch.randn(rows, 8))
        found += [swapped] if n > 3 * EVERY else []
    assert min(found) >= 4


def test_a_backward_inside_of_the_call_does_not_hide_what_leaves(install, packs):
    class Penalty(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Sequential(*(nn.Tanh() for _ in range(3)))
            self.weight, self.last = nn.Parameter(torch.ones(1)), Zeros()
            self.end = nn.Linear(8, 8)
            self.last.large = True

        def forward(self, x):
            at = torch.randn(1 << 14, requires_grad=True)
            y = self.first(at * self.weight).sum()
            (grad,) = torch.autograd.grad(y, at)
            return grad.sum() * self.weight + self.last(x) + self.end(x).sum()

    model = Penalty()
    handle = install(model, remat=False)
    found = [swapped_by(handle, model, torch.randn(4, 8)) for _ in range(2 * EVERY)]
    assert min(found[2:]) >= 4


def test_no_span_goes_back_in_the_step_or_beyond_what_is_known():
    boundaries = [Boundary() for _ in range(5)]
    at = (0, 5, 2, 2, 9)  # a step began between the second and the third
    events = [Event(boundaries[i], at[i], 10 * i, ours=True) for i in range(5)]
    recipe: Any = object()
    lay_out(Record(events, [(recipe, 1)] * 5), [None] * 5)
    # Only small tensors and parameters were saved between these two.
    assert [b.turns for b in boundaries] == [False, False, True, True, False]


@pytest.mark.parametrize("tells", [False, True])
def test_the_last_tensors_tell_that_backward_has_begun(tells):
    boundaries = [Boundary() for _ in range(4)]
    events = [Event(b, 0, n, ours=True) for b, n in zip(boundaries, (0, 10, 20, 20), strict=True)]
    lay_out(Record(events, []), [], tells=tells)
    assert [b.turns for b in boundaries] == [True, tells, False, not tells]


@pytest.mark.parametrize("tells", [False, True])
def test_the_hooks_stay_on_for_the_last_tensors_over_a_link(install, packs, monkeypatch, tells):
    monkeypatch.setattr("cswap.engine.engine.SwapEngine.begins_with_backward", tells)
    model = nn.Sequential(*(nn.Tanh() for _ in range(12)), nn.Linear(8, 8))
    install(model)
    counts = []
    for _ in range(3 * EVERY):
        packs.clear()
        model(torch.randn(4, 8, requires_grad=True)).sum().backward()
        counts.append(packs.total())
    assert min(counts) == (2 if tells else 0)  # those of the product
    assert max(counts) == 14
