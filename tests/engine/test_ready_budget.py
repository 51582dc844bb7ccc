"""How much decoded memory may wait to be asked for again."""

from __future__ import annotations

from typing import Any

import torch

from cswap.engine.order.step_order import StepOrder
from cswap.engine.saved.aliases import make_token
from cswap.engine.transfer.ready_budget import ReadyBudget

NO_LANE: Any = None  # nothing here moves a tensor


def handle_of(numel):
    return make_token(torch.zeros(numel), NO_LANE).handle


def test_the_oldest_result_is_dropped_when_too_many_wait():
    budget = ReadyBudget(1000, None)
    a, b, c = (handle_of(100) for _ in range(3))
    assert budget.add(a) == []
    assert budget.add(b) == []
    assert budget.add(c) == [a]
    budget.remove(b)
    assert budget.add(handle_of(120)) == []


def test_one_result_may_always_wait_and_counts_once():
    budget = ReadyBudget(100, None)
    large = handle_of(1000)
    assert budget.add(large) == []
    assert budget.add(large) == []
    budget.remove(large)
    budget.remove(large)
    assert not budget.waiting


def test_a_step_without_backward_begins_anew_when_told():
    order = StepOrder()
    for _ in range(3):
        order.next_position()
    order.begin_step()
    order.begin_step()  # nothing saved in between: the same step
    assert order.next_position() == (0, 1)
