"""Sequences of ever new lengths: memory stays, explanations stay short, gradients stay exact."""

from __future__ import annotations

import gc
import pkgutil
import tracemalloc
from pathlib import Path

import pytest
import torch
from torch import nn

import cswap

SHORTEST = 16
SEEN, MORE = 100, 200
"""Lengths with which the tables fill, and lengths that come then."""

GROWTH_BYTES = 4 << 20
"""A table that has just forgotten its older half grows by as much again."""

PART = 4
"""By default, tables and lengths are this part of the whole: memory is counted slowly."""

TABLES = (
    *("engine.recipes.MOST_RECIPES", "engine.trials.MOST_TRIALS"),
    "advisor.advisor.MAX_SITES",
)
"""Entries of what is remembered by sizes."""

LOSSY = {"lossy": "int8", "guard_every": 0}
CSWAP = str(Path(cswap.__file__).parent / "*")


class Net(nn.Module):
    """Saves 21 tensors of the sequence's length, by operators of many kinds."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Linear(8, 16)
        self.blocks = nn.ModuleList(
            nn.Sequential(
                *(nn.LayerNorm(16), nn.Linear(16, 16), nn.ReLU()),
                *(nn.Linear(16, 16), nn.GELU()),
            )
            for _ in range(3)
        )
        self.head = nn.Linear(16, 4)

    def forward(self, x):
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return torch.softmax(self.head(h), -1)


def gradients(net, length):
    """Of a batch that depends on the length alone."""
    x = torch.randn(2, length, 8, generator=torch.Generator().manual_seed(length))
    return torch.autograd.grad(net(x).square().mean(), [*net.parameters()])


def allocated_bytes():
    """Of Python's memory, by lines of cswap's files."""
    gc.collect()
    found = tracemalloc.take_snapshot().filter_traces([tracemalloc.Filter(True, CSWAP)])
    return sum(trace.size for trace in found.traces)


@pytest.fixture
def traced():
    yield tracemalloc.start
    tracemalloc.stop()


@pytest.mark.parametrize(
    ("options", "part"),
    [
        ({}, PART),
        *(
            pytest.param(o, 1, marks=pytest.mark.slow)
            for o in ({}, LOSSY, {"codec": "zvc"}, {"codec": "raw"})
        ),
    ],
)
def test_memory_does_not_grow_with_new_lengths(options, part, traced, monkeypatch):
    for table in TABLES:
        monkeypatch.setattr(f"cswap.{table}", pkgutil.resolve_name(f"cswap.{table}") // part)
    seen, more = SEEN // part, MORE // part
    torch.manual_seed(0)
    net = Net()
    with cswap.install(net, min_bytes=0, **options) as handle:
        for length in range(SHORTEST, SHORTEST + 12):  # compiles, which is slow when it is traced
            gradients(net, length)
        traced()
        for length in range(SHORTEST, SHORTEST + seen):
            gradients(net, length)
        before, rows = allocated_bytes(), len(handle.engine.explain())
        for length in range(SHORTEST + seen, SHORTEST + seen + more):
            gradients(net, length)
        grown = allocated_bytes() - before
        assert grown < GROWTH_BYTES // part
        # Four classes for each power of two: of 116 to 316 there are seven more.
        assert len(handle.engine.explain()) <= rows + 7 * 21
        assert handle.stats.fallbacks == 0


def test_gradients_are_exact_at_lengths_that_were_forgotten(monkeypatch):
    for table in TABLES:
        monkeypatch.setattr(f"cswap.{table}", 16)
    torch.manual_seed(0)
    net = Net()
    lengths = [*range(40, 52), *range(40, 52), 900, 40, 40, 40, 51, 51, 51]
    wanted = {length: gradients(net, length) for length in lengths}
    with cswap.install(net, min_bytes=0, slowdown=1e6) as handle:
        for length in lengths:
            assert all(map(torch.equal, gradients(net, length), wanted[length]))
        assert handle.stats.swapped > 0
        assert handle.stats.fallbacks == 0
