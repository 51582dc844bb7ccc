"""What backward will ask for next, and how much may be decoded ahead."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch

from cswap.engine.order.lookahead import Lookahead
from cswap.engine.order.step_order import StepOrder
from cswap.engine.saved.aliases import make_token
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.ready_budget import ReadyBudget
from tests.engine.engines import engine_over_a_link

NO_LANE: Any = None  # nothing here moves a tensor


def save(order, n):
    """Save n tensors; (handles, the tokens that keep them alive)."""
    handles, tokens = [], []
    for _ in range(n):
        token = make_token(torch.zeros(4), NO_LANE)
        handle = token.handle
        handle.position, handle.step = order.next_position()
        order.add(handle, token)
        handles.append(handle)
        tokens.append(token)
    return handles, tokens


def positions(found):
    return [h.position for h in found]


def coming(order, handle, count):
    """Positions of those to be asked for after this one, by a new `Lookahead`."""
    return due(Lookahead(order).after(handle, count))


def due(found):
    """Positions of tensors that have not been begun, of those that are alive."""
    return [token.handle.position for c in found[1] if (token := c.owner()) is not None]


def distances(found):
    """From the tensor that was asked for."""
    n_asked, ahead = found
    return [c.number - n_asked for c in ahead]


def test_in_the_first_step_last_in_is_first_out():
    order = StepOrder()
    handles, _tokens = save(order, 5)
    assert coming(order, handles[4], 2) == [3, 2]
    assert coming(order, handles[0], 2) == []


def test_what_died_is_passed_over():
    order = StepOrder()
    handles, tokens = save(order, 5)
    del tokens[3]
    assert coming(order, handles[4], 2) == [2, 1]
    order.discard(handles[2])
    assert coming(order, handles[4], 2) == [1, 0]


def test_the_order_of_the_last_step_is_learned():
    order = StepOrder()
    first, _alive = save(order, 4)
    for i in (1, 3, 0, 2):
        order.asked(first[i])
    second, _alive_too = save(order, 4)  # saving after asking begins a step
    assert [h.step for h in second] == [1] * 4
    assert positions(second) == [0, 1, 2, 3]
    order.asked(second[1])
    assert coming(order, second[1], 2) == [3, 0]
    assert coming(order, second[0], 2) == [2, 1]  # after the last one known: downwards


def test_a_swap_in_that_was_begun_is_not_begun_again():
    order = StepOrder()
    handles, _tokens = save(order, 6)
    lookahead = Lookahead(order)
    found = lookahead.after(handles[5], 3)
    assert (due(found), distances(found)) == ([4, 3, 2], [1, 2, 3])
    lookahead.begun(found[1][0])
    lookahead.begun(found[1][1])
    found = lookahead.after(handles[4], 3)
    assert (due(found), distances(found)) == ([2, 1], [2, 3])
    lookahead.begun(found[1][1])
    found = lookahead.after(handles[4], 3)  # another view of the same memory
    assert (due(found), distances(found)) == ([2], [2])
    assert due(lookahead.after(handles[3], 3)) == [2, 0]
    assert due(lookahead.after(handles[2], 3)) == [0]  # asked for: it need not be begun


def test_dropped_memory_and_another_order_are_looked_at_anew():
    order = StepOrder()
    handles, _tokens = save(order, 6)
    lookahead = Lookahead(order)
    for each in lookahead.after(handles[5], 2)[1]:
        lookahead.begun(each)
    assert due(lookahead.after(handles[5], 2)) == []
    lookahead.forget()
    assert due(lookahead.after(handles[5], 2)) == [4, 3]
    found = lookahead.after(handles[5], 2)[1]
    assert due(lookahead.after(handles[3], 2)) == [2, 1]  # backward took another branch
    lookahead.begun(found[1])  # of the order before: nothing happens
    assert due(lookahead.after(handles[3], 2)) == [2, 1]


def test_a_cycle_in_the_learned_order_ends():
    order = StepOrder()
    first, _alive = save(order, 3)
    for i in (1, 0, 2):  # 2 was last; downwards from it comes 1 again
        order.asked(first[i])
    second, _alive_too = save(order, 3)
    order.asked(second[1])
    lookahead = Lookahead(order)
    assert due(lookahead.after(second[1], 8)) == [0, 2]
    assert due(lookahead.after(second[0], 8)) == [2]
    assert due(lookahead.after(second[2], 8)) == []


def test_tensors_without_handles_do_not_begin_the_order_anew():
    order = StepOrder()
    handles, tokens = save(order, 6)
    del tokens[4]
    order.discard(handles[4])
    lookahead = Lookahead(order)
    for each in lookahead.after(handles[5], 2)[1]:
        lookahead.begun(each)
    assert due(lookahead.after(handles[4], 2)) == []  # 3 and 2 are under way
    assert due(lookahead.after(handles[3], 2)) == [1]


def test_a_step_without_backward_begins_anew_when_told():
    order = StepOrder()
    save(order, 3)
    order.begin_step()
    order.begin_step()  # nothing saved in between: the same step
    handles, _alive = save(order, 1)
    assert (handles[0].step, handles[0].position) == (1, 0)


def handle_of(numel):
    return make_token(torch.zeros(numel), NO_LANE).handle


def test_the_oldest_result_is_dropped_when_too_many_wait():
    budget = ReadyBudget(1000)
    a, b, c = (handle_of(100) for _ in range(3))
    assert budget.add(a) == []
    assert budget.add(b) == []
    assert not budget.fits(400)
    assert budget.add(c) == [a]
    budget.remove(b)
    assert budget.fits(400)


def test_one_result_may_always_wait_and_counts_once():
    budget = ReadyBudget(100)
    large = handle_of(1000)
    assert budget.add(large) == []
    assert budget.add(large) == []
    budget.remove(large)
    budget.remove(large)
    assert budget.fits(100)


def test_tensors_of_a_device_without_a_link_are_passed_over():
    engine = engine_over_a_link(0, codec="raw", min_bytes=0)
    packed: list[Any] = [engine.pack(torch.randn(1 << 12)) for _ in range(3)]
    engine.synchronize()
    between = packed[1].token
    lane, between.lane = between.lane, SimpleNamespace(ahead=0)
    engine.unpack(packed[2])
    between.lane = lane
    states = [one.token.handle.state for one in packed]
    assert states == [State.READY, State.STORED, State.STORED]
