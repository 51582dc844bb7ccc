"""The goal that is named as the smallest can be held: by `Goal.smallest_bytes`, and by an error."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

import pytest
import torch
from torch import nn

from bench.workloads.modes import held
from bench.workloads.saved_bytes import SavedBytes
from cswap.errors import GoalError
from cswap.fit import solve
from cswap.fit.way_program import WayProgram

if TYPE_CHECKING:
    from collections.abc import Callable

STEPS = 20


def convolutions(n_in, n_out, norm):
    return nn.Sequential(
        *(nn.Conv2d(n_in, n_out, 3, padding=1), norm(n_out), nn.SiLU()),
        *(nn.Conv2d(n_out, n_out, 3, padding=1), norm(n_out), nn.SiLU()),
    )


class UNet(nn.Module):
    """Two levels with a skip between them, concatenation and upsampling."""

    def __init__(self, norm=partial(nn.GroupNorm, 4)):  # noqa: B008
        super().__init__()
        sizes = (3, 8), (8, 16), (24, 8)
        self.down, self.below, self.up = (convolutions(*n, norm) for n in sizes)
        self.head = nn.Conv2d(8, 2, 1)

    def forward(self, x):
        skip = self.down(x)
        below = self.below(nn.functional.max_pool2d(skip, 2))
        above = nn.functional.interpolate(below, scale_factor=2.0, mode="bilinear")
        return self.head(self.up(torch.cat([skip, above], 1)))


class Recurrent(nn.Module):
    """An LSTM's cell, step by step."""

    def __init__(self):
        super().__init__()
        self.cell, self.head = nn.LSTMCell(32, 32), nn.Linear(32, 32)

    def forward(self, x):
        h = c = torch.zeros(len(x), 32)
        out = []
        for t in range(x.shape[1]):
            h, c = self.cell(x[:, t], (h, c))
            out.append(self.head(h).tanh())
        return torch.stack(out, 1)


def transformer():
    layer = nn.TransformerEncoderLayer(32, 4, 128, 0.1, "gelu", batch_first=True, norm_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


class Residual(nn.Module):
    """Residual blocks with batch norms."""

    def __init__(self):
        super().__init__()
        self.stem = nn.Conv2d(3, 8, 3, padding=1)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8), nn.ReLU()),
                *(nn.Conv2d(8, 8, 3, padding=1, bias=False), nn.BatchNorm2d(8)),
            )
            for _ in range(3)
        )

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = torch.relu(x + block(x))
        return x


NETS = {
    "unet": (UNet, (2, 3, 32, 32)),
    "transformer": (transformer, (4, 32, 32)),
    "residual": (Residual, (4, 3, 16, 16)),
    "recurrent": (Recurrent, (64, 12, 32)),
}


class Run(nn.Module):
    """A net with its loss, and steps of its training; the same for the same seed."""

    def __init__(self, kind, seed, nets=None):
        super().__init__()
        torch.manual_seed(seed)
        make, shape = (NETS if nets is None else nets)[kind]
        self.net, self.batch = make(), torch.randn(shape)
        self.probe: Callable[[], AbstractContextManager[None]] = nullcontext
        self.optimizer = torch.optim.AdamW(self.net.parameters(), 1e-3)
        self.n_steps = 0

    def forward(self, x):
        with self.probe():
            return self.net(x).square().mean()

    def train_steps(self, n):
        for _ in range(n):
            self.n_steps += 1
            torch.manual_seed(self.n_steps)
            self.optimizer.zero_grad()
            self(self.batch + 0.1 * torch.randn_like(self.batch)).backward()
            self.optimizer.step()

    def saved_peak(self, handle):
        """Of a step, by another meter than the goal's."""
        owned = [*self.parameters(), *self.buffers()]
        meter = SavedBytes(owned, (), lambda: held(handle))
        self.probe = meter.watch
        self.train_steps(1)
        self.probe = nullcontext
        return meter.curve.peak


@pytest.fixture
def start(install):
    """A run under a goal."""

    def make(kind, seed, fit, **options):
        run = Run(kind, seed)
        return run, install(run, fit=fit, **options)

    return make


@pytest.fixture
def assert_holds(start):
    def check(kind, seed, named):
        run, handle = start(kind, seed, named)
        run.train_steps(STEPS)
        goal = handle.goal
        for _ in range(4):  # it may have been made anew just now
            if goal.measured_bytes is None:
                run.train_steps(1)
                goal = handle.goal
        assert goal.held is True
        assert goal.smallest_bytes <= named
        assert goal.resident_bytes + run.saved_peak(handle) <= named + run.batch.nbytes

    return check


def cases(usual):
    """All nets and seeds; slow but for the first seed of the usual net."""
    return [
        pytest.param(kind, seed, marks=() if (kind, seed) == (usual, 0) else pytest.mark.slow)
        for kind in NETS
        for seed in (0, 1)
    ]


@pytest.mark.parametrize(("kind", "seed"), cases("transformer"))
def test_the_smallest_goal_of_an_easy_one_is_held(start, assert_holds, kind, seed):
    run, handle = start(kind, seed, "1TiB")
    run.train_steps(8)
    assert set(handle.goal.actions) == {"keep"}
    plain = handle.goal.measured_bytes
    for share in (0.98, 0.8):
        goal = handle.goal
        fit = goal.resident_bytes + share * (plain - goal.resident_bytes)
        run, handle = start(kind, seed, int(fit))
        run.train_steps(12)
        assert handle.goal.smallest_bytes is not None
        assert_holds(kind, seed, handle.goal.smallest_bytes)


@pytest.mark.parametrize(("kind", "seed"), cases("residual"))
def test_the_smallest_goal_that_an_error_names_is_held(start, assert_holds, kind, seed):
    run, handle = start(kind, seed, "1TiB")
    run.train_steps(1)
    run, handle = start(kind, seed, int(1.05 * handle.goal.resident_bytes))
    with pytest.raises(GoalError) as e:
        run.train_steps(STEPS)
    assert handle.goal.smallest_bytes <= e.value.smallest_bytes
    assert handle.goal.measured_bytes < e.value.smallest_bytes
    assert_holds(kind, seed, e.value.smallest_bytes)


@pytest.mark.parametrize(
    "kind",
    ["residual", *(pytest.param(n, marks=pytest.mark.slow) for n in ("unet", "transformer"))],
)
def test_a_plan_that_is_larger_than_predicted_gives_way_to_the_next_one(
    start, assert_holds, monkeypatch, kind
):
    # The solver's least bytes are a plan that holds everything.
    def is_wrong(self, *, limit_bytes, limit_s):
        if limit_bytes < float("inf"):
            return None
        saved = self._problem.saved
        kept = {i: way for i, one in enumerate(saved) for way in one.ways if way.action == "keep"}
        return replace(self._problem.plan(kept), peak_bytes=0)

    run, handle = start(kind, 0, "1TiB")
    run.train_steps(1)
    tight = int(1.05 * handle.goal.resident_bytes)
    measured = []
    for wrong in (False, True):
        solver = is_wrong if wrong else lambda *_, **__: None
        monkeypatch.setattr(WayProgram, "solve", solver)
        run, handle = start(kind, 0, tight)
        with pytest.raises(GoalError):
            run.train_steps(STEPS)
        run.train_steps(4)  # under the plan that stays in force
        measured.append(handle.goal.measured_bytes)
    assert measured[1] == pytest.approx(measured[0], rel=0.01)
    assert_holds(kind, 0, int(1.005 * measured[0]))


@pytest.mark.parametrize("kind", ["unet", "residual"])
def test_after_the_error_the_plan_that_was_measured_to_be_the_smallest_stays(
    start, monkeypatch, kind
):
    smallest = solve.smallest

    def and_all_kept(problem):
        ways = {i: w for i, one in enumerate(problem.saved) for w in one.ways if w.action == "keep"}
        return (*smallest(problem), problem.plan(ways))

    monkeypatch.setattr(solve, "smallest", and_all_kept)
    run, handle = start(kind, 0, "1TiB")
    run.train_steps(1)
    run, handle = start(kind, 0, int(1.05 * handle.goal.resident_bytes))
    with pytest.raises(GoalError) as e:
        run.train_steps(STEPS)
    run.train_steps(4)
    assert handle.goal.resident_bytes + run.saved_peak(handle) <= e.value.smallest_bytes


def test_larger_batches_have_another_smallest_goal(start):
    run, handle = start("residual", 0, "1TiB")
    run.train_steps(8)
    assert handle.goal.smallest_bytes is not None
    run.batch = torch.cat([run.batch] * 3)
    run.train_steps(STEPS)
    assert handle.goal.smallest_bytes is None
