"""A module that begins to save other tensors has its hooks again."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from tests.quiet_modules.training import (
    LARGE,
    STEPS,
    Net,
    Training,
    settle,
)


@pytest.mark.parametrize("starts", [False, True])
def test_a_module_that_saves_other_tensors_in_turns_is_not_quiet(install, starts):
    class InTurns(nn.Module):
        even = False

        def forward(self, x):
            self.even = not self.even
            return (x.repeat(1, 64).sin() if self.even else x.sin()).sum(1)

    training = Training(nn.Sequential(nn.Linear(4, 4), InTurns()))
    training.model[1].even = starts
    handle = install(training.model, remat=False, codec="raw")
    for n in range(3 * STEPS):
        before = handle.stats.swapped
        training.step()
        assert handle.stats.swapped - before == (n + 1 + starts) % 2


def test_after_another_tensor_hooks_stay_on(install, packs):
    class Extra(nn.Module):
        extra = False

        def forward(self, x):
            for _ in range(1 + self.extra):
                x = x + x.repeat(1, 64).sin().sum()
            return x

    training = Training(nn.Sequential(nn.Linear(4, 4), Extra(), Net()))
    handle = install(training.model, remat=False, codec="raw")
    settle(training, packs)
    before = handle.stats.swapped
    training.step()
    quiet, swapped = packs[4], handle.stats.swapped - before
    packs.clear()
    training.model[1].extra = True
    training.step()
    assert packs[4] > quiet
    assert handle.stats.swapped - before == 2 * swapped + 1


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("positional", marks=pytest.mark.slow),
        pytest.param("keyword", marks=pytest.mark.slow),
        "dict",
    ],
)
def test_a_larger_input_is_seen_at_once_wherever_it_is_used(install, how):
    class TwoInputs(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = Net(), Net()

        def forward(self, x, y):
            y = y["y"] if isinstance(y, dict) else y
            return self.first(x).square().mean() + self.second(y).square().mean()

    def call(y):
        x = torch.randn(16, 4)
        arguments = {"positional": (x, y), "keyword": (x,), "dict": (x, {"y": y})}[how]
        model(*arguments, **({"y": y} if how == "keyword" else {})).backward()

    model = TwoInputs()
    handle = install(model, remat=False, codec="raw", min_bytes=16 * 64 * 4 + 1)
    for _ in range(STEPS):
        call(torch.randn(16, 4))
    assert not handle.stats.swapped
    call(torch.randn(64, 4))
    assert handle.stats.swapped > 4


@pytest.mark.parametrize(
    "grow_at",
    [2, pytest.param(5, marks=pytest.mark.slow), pytest.param(12, marks=pytest.mark.slow)],
)
def test_a_larger_batch_is_seen_at_once(install, grow_at):
    training = Training()
    handle = install(training.model, remat=False, codec="raw", min_bytes=16 * 64 * 4 + 1)
    settle(training)
    for n in range(13):
        before = handle.stats.swapped
        training.step(rows=32 if n == grow_at else 16)
        assert (handle.stats.swapped > before) is (n == grow_at)


def test_another_mode_or_dtype_is_seen_at_once(install, packs):
    training = Training()
    install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.model.large.eval()
    training.step()
    assert packs[64]
    settle(training, packs)
    with torch.autocast("cpu", torch.bfloat16):
        training.model.large.train()
        training.step()
    assert packs[16 * 64]


def test_a_change_in_place_raises_in_a_quiet_module(install):
    class Changes(nn.Module):
        changes = False

        def forward(self, x):
            y = torch.sigmoid(x)
            if self.changes:
                y.add_(1.0)
            return y * 2.0

    training = Training(nn.Sequential(nn.Linear(4, 4), Changes()))
    install(training.model, min_bytes=LARGE)
    settle(training)
    training.model[1].changes = True
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        training.step()


def test_a_forward_without_gradients_teaches_nothing(install, packs):
    training = Training()
    install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.step()
    quiet = packs.total()
    with torch.no_grad():
        for _ in range(STEPS):
            training.model(torch.randn(16, 4))
    packs.clear()
    training.step()
    assert packs.total() == quiet


def test_a_new_plan_is_learned_anew(install, packs):
    training = Training()
    handle = install(training.model, min_bytes=LARGE)
    settle(training, packs)
    training.step()
    quiet = packs.total()
    packs.clear()
    handle.engine.renumber()
    training.step()
    assert packs.total() > 2 * quiet


@pytest.mark.parametrize(
    "period", [5, *(pytest.param(n, marks=pytest.mark.slow) for n in (3, 17, 34))]
)
def test_a_module_that_has_changed_is_quiet_later_and_later(install, period):
    class Now(nn.Module):
        large, n_calls = 0, 0

        def forward(self, x):
            self.n_calls += 1
            return (x.repeat(1, 64).sin() if self.n_calls % period == 0 else x.sin()).sum(1)

    training = Training(nn.Sequential(nn.Linear(4, 4), Now()))
    handle = install(training.model, remat=False, codec="raw")
    missed = []
    for n in range(1, 600):
        before = handle.stats.swapped
        training.step()
        if n % period == 0:
            missed.append(handle.stats.swapped == before)
    assert sum(missed) < len(missed) / 2


@pytest.mark.parametrize("how", ["parameter", "no_grad"])
def test_a_module_that_begins_to_train_is_seen_at_once(install, how):
    class MayFreeze(Net):
        frozen = True

        def forward(self, x):
            x = self.wide(self.small(x).detach())
            with torch.set_grad_enabled(not (how == "no_grad" and self.frozen)):
                return self.large(x)

    training = Training(MayFreeze())
    if how == "parameter":
        training.model.large.requires_grad_(False)
        training.model.wide.requires_grad_(False)
    handle = install(training.model, remat=False, codec="raw")
    for _ in range(STEPS):
        with torch.enable_grad():
            loss = training.model(torch.randn(16, 4)).square().mean()
        if loss.requires_grad:
            loss.backward()
    before = handle.stats.swapped
    training.model.frozen = False
    training.model.requires_grad_(True)
    training.step()
    assert handle.stats.swapped - before >= 8
