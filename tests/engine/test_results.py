"""Results of operators that ran again, and wait for others who will ask for them."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cswap.engine.saved.results import MOST_OVER_A_LINK, Results
from cswap.stats.counters import Counters


class First:
    """Stands for an object without a handle, over a link."""

    result = None
    lane: Any = SimpleNamespace(
        device=SimpleNamespace(now=lambda: None, unified=False), ready_bytes=1 << 30
    )

    def __init__(self, nbytes):
        self.nbytes = nbytes


def lent(results, *sizes):
    firsts: list[Any] = [First(nbytes) for nbytes in sizes]
    for first in firsts:
        results.lend(first, torch.empty(0))
    return firsts


def test_the_oldest_results_go_where_too_many_wait():
    counters = Counters()
    results = Results(counters)
    many = lent(results, *range(1, MOST_OVER_A_LINK + 3))
    assert [first.result is None for first in many] == [True] * 2 + [False] * MOST_OVER_A_LINK
    assert counters.held_bytes == results.nbytes == sum(range(3, MOST_OVER_A_LINK + 3))
    results.clear()
    assert counters.held_bytes == results.nbytes == 0
    assert all(first.result is None for first in many)
