"""Results of operators that ran again, and wait for others who will ask for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.saved.results import MOST_OVER_A_LINK, OF_UNDER_WAY, Results
from cswap.stats.counters import Counters


class First:
    """Stands for an object without a handle, over a link."""

    result = None
    lane: Any = SimpleNamespace(device=SimpleNamespace(now=lambda: None, unified=False))

    def __init__(self, nbytes):
        self.nbytes = nbytes


def lent(results, *sizes):
    firsts: list[Any] = [First(nbytes) for nbytes in sizes]
    for first in firsts:
        results.lend(first, torch.empty(0))
    return firsts


def test_the_oldest_results_go_where_too_many_or_too_large_ones_wait():
    counters = Counters()
    results = Results(counters)
    many = lent(results, *range(1, MOST_OVER_A_LINK + 3))
    assert [first.result is None for first in many] == [True] * 2 + [False] * MOST_OVER_A_LINK
    results.clear()
    results.most_bytes = 100
    few = lent(results, 40, 40, 40)
    assert [first.result is None for first in few] == [True, False, False]
    assert counters.held_bytes == results.nbytes == 80
    (large,) = lent(results, 300)  # its users are about to ask
    assert large.result is not None
    assert [first.result for first in few] == [None] * 3
    assert counters.held_bytes == results.nbytes == 300


def test_a_plan_bounds_the_results_that_wait():
    engine = SwapEngine(SwapConfig())
    for planned in (1000, 0):
        engine.plan_copies(planned)
        assert engine._state.results.most_bytes == OF_UNDER_WAY * planned
