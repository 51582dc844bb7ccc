"""Decoded memory that waits to be asked for again, and positions in a step."""

from __future__ import annotations

from typing import Any

import torch

from cswap.devices.cpu import CpuDevice
from cswap.engine.order.step_order import StepOrder
from cswap.engine.saved.aliases import make_token
from cswap.engine.saved.results import Results
from cswap.stats.counters import Counters


class Lane:
    """The part of a `Lane` that results ask for."""

    device = CpuDevice()

    def __init__(self, ready_bytes):
        self.ready_bytes = ready_bytes


def lent(results, lane: Any, numel):
    token = make_token(torch.zeros(numel), lane)
    results.lend(token, torch.ones(numel))
    return token


def test_so_many_bytes_wait_and_one_result_always_may():
    results, lane = Results(Counters()), Lane(1000)
    tokens = [lent(results, lane, n) for n in (100, 100, 1000)]
    assert [token.result is None for token in tokens] == [True, True, False]
    results.clear()
    assert results.nbytes == 0
    assert results.found(tokens[2]) is None


def test_memory_that_a_user_has_written_into_serves_nobody_else():
    results = Results(Counters())
    token = lent(results, Lane(1 << 30), 10)
    found = results.found(token)
    assert found is not None
    found.add_(1)
    assert results.found(token) is None


def test_a_step_without_backward_begins_anew_when_told():
    order = StepOrder()
    for _ in range(3):
        order.next_position()
    order.begin_step()
    order.begin_step()  # nothing saved in between: the same step
    assert order.next_position() == (0, 1)
