"""A choice that a goal has made for one tensor meets another one at its place: nothing is wrong."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.fit.goal_chooser import GoalChooser


class Branches(nn.Module):
    """Saves 16 KiB of float32 in one branch, and 16 KiB of bool in the other one."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.linspace(0.1, 0.2, 16384))

    def forward(self, first):
        if first:
            return self.p[:4096].exp().sum()
        return torch.where(self.p > 0.15, self.p, 0 * self.p).sum()


def test_a_bool_tensor_where_a_float_one_was():
    model = Branches()
    with cswap.install(model, fit="min", min_bytes=0):
        model(True).backward()
        model.zero_grad()
        model(False).backward()
    assert model.p.grad is not None
    assert float(model.p.grad.sum()) == 8192


class Recurrent(nn.Module):
    """Of 128 sequences, values take 28,672 bytes; of one, torch's workspace of uint8 does."""

    def __init__(self):
        super().__init__()
        self.lstm, self.head = nn.LSTM(8, 24, batch_first=True), nn.Linear(24, 4)

    def forward(self, x):
        return self.head(self.lstm(x)[0]).square().mean()


class Gathers(nn.Module):
    """Saves an index in some steps, and values of as many bytes in others."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.rand(4096))

    def forward(self, n):
        if n % 2:
            index = torch.arange(2048).flip(0)
            return (torch.gather(self.p, 0, index) * torch.arange(2048)).sum()
        return self.p.exp().sum()


def gradients(model, x):
    model.zero_grad()
    model(x).backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.parametrize("slowdown", [1.1, 30.0])
@pytest.mark.parametrize(
    ("make", "inputs"),
    [
        (Recurrent, [torch.rand(n, 7, 8) for n in (128, 1, 128, 1, 128, 128, 1, 7, 128, 1)]),
        (Gathers, [0, 1, 0, 1, 0, 0, 1, 1, 0, 1, 0, 1, 0, 0]),
    ],
)
def test_gradients_keep_their_bits_where_sizes_and_dtypes_change(make, inputs, slowdown):
    torch.manual_seed(0)
    plain = make()
    ours = copy.deepcopy(plain)
    with cswap.install(ours, fit="min", slowdown=slowdown, min_bytes=0):
        for x in inputs:
            assert all(map(torch.equal, gradients(ours, x), gradients(plain, x)))


class Probabilities(nn.Module):
    """Saves what may be rounded in some steps, and probabilities of as many bytes in others."""

    def __init__(self):
        super().__init__()
        self.p = nn.Parameter(torch.randn(64, 128))

    def forward(self, n):
        if n % 2:
            return (self.p.softmax(-1) * torch.arange(128)).sum()
        return self.p.exp().sum()


def test_probabilities_stay_exact_where_a_lossy_codec_was_chosen():
    torch.manual_seed(0)
    plain = Probabilities()
    ours = copy.deepcopy(plain)
    options: dict[str, Any] = {
        "fit": "min",
        "slowdown": 30.0,
        "lossy": "int8",
        "guard_every": 0,
        "remat": False,
    }
    with cswap.install(ours, min_bytes=0, **options) as handle:
        for n in (0, 1, 0, 1, 0, 0, 1, 0, 1, 1, 0, 1):
            found, wanted = gradients(ours, n), gradients(plain, n)
            if n % 2:
                assert all(map(torch.equal, found, wanted))
        assert any("int8" in name for name in handle.stats.by_codec)


@pytest.mark.parametrize(
    ("codec", "make", "x"),
    [("zvc+expk", Branches, False), ("int8", Probabilities, 1)],
)
def test_a_wrong_choice_is_a_counted_fallback(codec, make, x, monkeypatch):
    """Whoever chooses may be wrong: the one place that encodes asks about this tensor."""
    monkeypatch.setattr(GoalChooser, "_smallest", lambda *_args, **_options: codec)
    monkeypatch.setattr(GoalChooser, "_planned", lambda *_: codec)
    torch.manual_seed(0)
    plain = make()
    ours = copy.deepcopy(plain)
    options: dict[str, Any] = {"fit": "min", "lossy": "int8", "guard_every": 0, "remat": False}
    with cswap.install(ours, min_bytes=0, **options) as handle:
        for _ in range(3):
            assert all(map(torch.equal, gradients(ours, x), gradients(plain, x)))
        assert handle.stats.fallbacks_by_reason.keys() == {f"{codec}:choice"}
        assert handle.stats.by_codec["raw"].count > 0
