"""Random models whose steps change, under goals: every bit is that of plain torch.

Sizes, dtypes, depth and branches change between steps. So a decision that was made for one tensor
meets another one, and a module that keeps state meets whoever would run its forward twice. Each
program runs beside a copy without cswap: losses, gradients, buffers, plain attributes and random
states are compared by bits.
"""

from __future__ import annotations

import copy
import random
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.engine.recomputer import Recomputer
from cswap.engine.replay.again_slot import AgainSlot
from cswap.engine.replay.in_line_slot import InLineSlot
from cswap.engine.replay.link_slot import LinkSlot
from cswap.engine.replay.shared_slot import SharedSlot
from cswap.errors import GoalError
from tests.fit.test_goal_over_a_link import machine

__all__ = ["machine"]

STEPS = 28
WIDTH = 32
DEFAULT_SEEDS = (4, 5, 10, 11, 14)
"""Programs in which slots take many tensors before and between the changes, and one without."""
SLOW_SEEDS = 80


def mlp(activation):
    return nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), activation, nn.Linear(2 * WIDTH, WIDTH))


class Where(nn.Module):
    """Saves a bool or values of the same bytes, as the step asks."""

    def forward(self, x, step):
        if step.branch % 2:
            return x + torch.where(x > 0.15, x, 0.5 * x)
        n = max(1, x.numel() // 4)
        return x + x.flatten()[:n].exp().sum() * 1e-6


class Gather(nn.Module):
    """Saves an int64 index in one branch, and values of as many bytes in another one."""

    def forward(self, x, step):
        rows = x.flatten(0, -2)
        if step.branch % 3:
            index = torch.arange(rows.numel(), dtype=torch.int64).view_as(rows) % len(rows)
            return x + torch.gather(rows, 0, index).view_as(x)
        return x + rows.double().sin().to(x.dtype).view_as(x)


class Mlp(nn.Module):
    def __init__(self):
        super().__init__()
        self.body = mlp(nn.GELU())
        self.norm = nn.LayerNorm(WIDTH)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x, step):
        return x + self.dropout(self.body(self.norm(x)))


class Attention(nn.Module):
    """Three arguments that are one object: torch's module tests for that."""

    def __init__(self):
        super().__init__()
        self.attention = nn.MultiheadAttention(WIDTH, 4, batch_first=True)

    def forward(self, x, step):
        return x + self.attention(x, x, x, need_weights=step.branch % 2 == 0)[0]


class Same(nn.Module):
    """Takes a branch by the identity of its arguments."""

    def __init__(self):
        super().__init__()
        self.inner = _SameInner()

    def forward(self, x, step):
        y = x * 1.5
        return x + (self.inner(y, y) if step.branch % 2 else self.inner(y, other=y))


class _SameInner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, a, other):
        hidden = self.linear(a)
        return torch.relu(hidden) * other if a is other else torch.tanh(hidden).sin() * other


class Lstm(nn.Module):
    """Its saved tensors are small or large with the batch."""

    def __init__(self):
        super().__init__()
        self.cell = nn.LSTMCell(WIDTH, WIDTH)

    def forward(self, x, step):
        h = c = torch.zeros(len(x), WIDTH, dtype=x.dtype)
        found = []
        for t in range(min(3, x.shape[1])):
            h, c = self.cell(x[:, t], (h, c))
            found.append(h)
        return x + torch.stack(found, 1).mean(1, keepdim=True)


class FusedNorm(nn.Module):
    """Reads a norm's statistics before the norm updates them, as quantised training does."""

    def __init__(self):
        super().__init__()
        self.body = mlp(nn.GELU())
        self.norm = nn.BatchNorm1d(WIDTH)

    def forward(self, x, step):
        variance = self.norm.running_var
        assert variance is not None
        scale = self.norm.weight / (variance + 1e-5).sqrt()
        y = self.body(x * scale) / scale
        return x + self.norm(y.transpose(1, 2)).transpose(1, 2)


class Observed(nn.Module):
    """Keeps a range in a buffer that it writes through ``.data``, and numbers in attributes."""

    def __init__(self):
        super().__init__()
        self.body = mlp(nn.SiLU())
        self.largest: torch.Tensor
        self.register_buffer("largest", torch.ones(1))
        self.average, self.calls = 1.0, 0

    def forward(self, x, step):
        self.largest.data = torch.maximum(self.largest, x.detach().abs().amax().view(1))
        self.calls += 1
        self.average = 0.9 * self.average + 0.1 * float(x.detach().abs().mean())
        return x + self.body(x / self.largest) * (self.average + self.calls % 3)


class Draws(nn.Module):
    """Draws numbers of Python's and NumPy's, from some step on."""

    def __init__(self):
        super().__init__()
        self.body = mlp(nn.ReLU())
        self.norm = nn.LayerNorm(WIDTH)

    def forward(self, x, step):
        factor = 1.0
        if step.number > 5:
            factor += random.random() + float(np.random.rand())  # noqa: NPY002
        return self.norm(x + factor * self.body(x))


class Softmax(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x, step):
        if step.branch % 2:
            return x + torch.softmax(self.linear(x), -1) * x
        return x + functional.hardtanh(self.linear(x)) * x


class Lately(nn.Module):
    """Registers a buffer in a later step, and uses it."""

    def __init__(self):
        super().__init__()
        self.body = mlp(nn.ReLU())

    def forward(self, x, step):
        if step.number == 7:
            self.late: torch.Tensor
            self.register_buffer("late", torch.zeros(()))
        y = self.body(x)
        if hasattr(self, "late"):
            y = y * (1 + self.late)
            self.late.add_(0.125)
        return x + y


class ByHand(nn.Module):
    """Multiplies a tensor that another operator saves, or nobody, by a number."""

    def __init__(self):
        super().__init__()
        self.linear, self.back = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x, step):
        x = self.linear(x)
        cube = x if step.branch % 3 == 0 else torch.pow(x, 3.0)
        return self.back(0.5 * x * (1.0 + torch.tanh(0.8 * (x + 0.044715 * cube))))


class Residual(nn.Module):
    """A sum with a tensor that a norm has saved, or with another one; dropout as on a GPU."""

    def __init__(self):
        super().__init__()
        self.norm, self.linear, self.last = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH), nn.ReLU()

    def forward(self, x, step):
        share = 0.3 if step.branch % 2 else 0.6
        y = torch.native_dropout(self.linear(self.norm(x)), share, step.branch % 5 > 0)[0]
        if step.branch % 4 == 3:
            x = x * 1.5
        return self.norm(x + y) + y.sin()


RESIDUAL = (ByHand, Residual)
"""Blocks whose sums and factors other operators save, or nobody."""

KINDS = (
    *(Where, Gather, Where, Gather, Gather, Mlp, Attention, Same, Lstm),
    *(FusedNorm, Observed, Draws, Softmax, Lately),
)


class Model(nn.Module):
    def __init__(self, kinds):
        super().__init__()
        self.stem = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([kind() for kind in kinds])
        self.head = nn.Linear(WIDTH, 8)

    def forward(self, x, step):
        x = self.stem(x)
        for block in self.blocks[: step.depth]:
            x = block(x, step)
        return functional.cross_entropy(self.head(x).flatten(0, 1), step.labels)


class Step:
    """The batch, branch, depth and precision of one step."""

    def __init__(self, number, draw, model, *, changes):
        self.number = number
        batch, length = 8, 16
        if "sizes" in changes:
            batch, length = draw.choice((1, 3, 8, 24)), draw.choice((2, 5, 16))
        self.x = torch.rand(batch, length, WIDTH, generator=torch.Generator().manual_seed(number))
        self.labels = torch.arange(batch * length) % 8
        self.branch = draw.randrange(6) if "branches" in changes else 1
        n = len(model.blocks)
        self.depth = draw.randint(1, n) if "depth" in changes else n
        self.autocast = "dtypes" in changes and draw.random() < 0.3


def options_of(draw):
    """Goals in nine of ten."""
    options = {"min_bytes": draw.choice((0, 1024))}
    if draw.random() < 0.3:  # a tensor that can be computed again has no codec
        options["remat"] = False
    if draw.random() < 0.9:
        options["fit"] = draw.choice(("min", "min", 1.0, 0.7, 0.5))
        if options["fit"] == "min":
            options["slowdown"] = draw.choice((1.1, 30.0, 30.0))
    return options


def in_bytes(share, model, inputs):
    """A goal: what model, gradients and this share of a step's saved bytes take."""
    found = {}

    def note(x):
        found[x.untyped_storage().data_ptr()] = x.untyped_storage().nbytes()
        return x

    with torch.autograd.graph.saved_tensors_hooks(note, lambda x: x):
        loss = copy.deepcopy(model)(inputs.x, inputs)
    del loss
    held = sum(x.nbytes for x in (*model.parameters(), *model.buffers()))
    return 2 * held + int(share * sum(found.values()))


def seed_all(number):
    torch.manual_seed(number)
    random.seed(number)
    np.random.seed(number)  # noqa: NPY002


def run_step(model, step):
    """Loss, gradients, and whatever else a step leaves behind."""
    seed_all(step.number)
    model.zero_grad()
    with torch.autocast("cpu", torch.bfloat16, enabled=step.autocast):
        loss = model(step.x, step)
    loss.backward()
    with torch.no_grad():
        for p in model.parameters():
            if p.grad is not None:
                p -= 0.05 * p.grad
    found: dict[str, Any] = {f"gradient {n}": p.grad for n, p in model.named_parameters()}
    found |= {f"buffer {n}": b.clone() for n, b in model.named_buffers()}
    for name, module in model.named_modules():
        found |= {f"{name}.{k}": v for k, v in vars(module).items() if isinstance(v, int | float)}
    found |= {"loss": loss.detach(), "torch": torch.get_rng_state(), "python": random.getstate()}
    return found | {"numpy": repr(np.random.get_state())}  # noqa: NPY002


def assert_equal_bits(ours, plain):
    assert ours.keys() == plain.keys()
    for name, value in plain.items():
        if isinstance(value, torch.Tensor):
            pair = (x.reshape(-1).view(torch.uint8) for x in (ours[name], value))  # NaN, too
            assert torch.equal(*pair), name
        else:
            assert ours[name] == value or repr(ours[name]) == repr(value), name  # NaN, too


def run_program(seed, after_step=lambda: None, kinds=KINDS):
    """One program: counts of the steps' ways, so that a test can say what it has reached."""
    draw = random.Random(seed)
    seed_all(seed)
    plain = Model([draw.choice(kinds) for _ in range(draw.randint(2, 5))])
    ours = copy.deepcopy(plain)
    options = options_of(draw)
    changes_from, share = draw.choice((0, 6, 12, 20)), draw.choice((1.0, 0.2))
    changes = draw.choice((("branches",), ("sizes",), ("sizes", "branches", "depth", "dtypes")))
    steps = [
        Step(
            n,
            draw,
            plain,
            changes=changes if n >= changes_from and draw.random() < share else (),
        )
        for n in range(STEPS)
    ]
    if isinstance(options.get("fit"), float):
        options["fit"] = in_bytes(options["fit"], plain, max(steps, key=lambda s: s.x.numel()))
    reached: Counter[str] = Counter()
    with cswap.install(ours, **options) as handle:
        for step in steps:
            expected = run_step(plain, step)
            try:
                found = run_step(ours, step)
            except GoalError:  # says so before the step begins
                reached["refused"] += 1
                break
            after_step()
            assert_equal_bits(found, expected)
            if handle.goal is not None:
                reached[handle.goal.phase] += 1
        for name, one in handle.stats.by_codec.items():
            reached["again" if name == "remat" else "encoded"] += one.count
    return reached


def reaches_all(reached):
    """Whether programs have come where decisions are obeyed and steps change under them."""
    assert reached["again"] > 0
    assert reached["encoded"] > 0
    assert reached["exploring"] > 0
    assert reached["obeying"] > 10 * len(DEFAULT_SEEDS) // 2


@pytest.fixture
def taken(monkeypatch):
    """How many tensors went by a slot, by its type."""
    found: Counter[type] = Counter()
    for kind in (AgainSlot, SharedSlot, InLineSlot, LinkSlot):

        def take(self, *args, own=kind.take):
            packed = own(self, *args)
            found[type(self)] += packed is not None
            return packed

        monkeypatch.setattr(kind, "take", take)
    return found


def test_changing_steps_have_the_bits_of_plain_torch(taken):
    reaches_all(sum((run_program(seed) for seed in DEFAULT_SEEDS), Counter()))
    assert min(taken[kind] for kind in (AgainSlot, SharedSlot, InLineSlot)) > 10, taken


@pytest.mark.parametrize("seeds", [range(4), pytest.param(range(4, 60), marks=pytest.mark.slow)])
def test_sums_and_dropout_in_changing_steps(seeds, taken):
    for seed in seeds:
        run_program(seed, kinds=RESIDUAL)
    assert taken[AgainSlot] > 40


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, SLOW_SEEDS, 10))
def test_more_changing_steps_have_the_bits_of_plain_torch(first):
    reached: Counter[str] = sum((run_program(seed) for seed in range(first, first + 10)), Counter())
    assert reached["obeying"] > 0


@pytest.mark.parametrize(
    "seeds",
    [DEFAULT_SEEDS, pytest.param(range(SLOW_SEEDS), marks=pytest.mark.slow)],
    ids=["few", "many"],
)
def test_changing_steps_over_a_link_have_the_bits_of_plain_torch(
    machine, taken, seeds, monkeypatch
):
    # Between two events of the stand-in are always 2 ms: too long to compute a tensor again.
    seconds = Recomputer.seconds
    monkeypatch.setattr(Recomputer, "seconds", lambda *a: None if seconds(*a) is None else 1e-9)
    for seed in seeds:
        run_program(seed, machine.cuda.synchronize)
        assert not machine.cuda.faults, (seed, machine.cuda.faults[:5])
    assert min(taken[kind] for kind in (AgainSlot, SharedSlot, LinkSlot)) > 10, taken
