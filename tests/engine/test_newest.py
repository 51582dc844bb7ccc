"""``budget`` and ``keep_last``: the tensors that were saved last stay, by the step before."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.engine.order.newest import LINK_SHARE, Newest
from cswap.engine.order.step_order import MOST_CALLS
from cswap.engine.replay.shared_slot import SharedSlot

OPTIONS: dict[str, Any] = {"min_bytes": 0, "codec": "raw", "remat": False}
ONE = 32 * 32 * 4


class Chain(nn.Module):
    """Saves one tensor for each of ``depth`` operators."""

    def __init__(self, depth=6):
        super().__init__()
        self.depth = depth

    def forward(self, x):
        for _ in range(self.depth):
            x = x.tanh()
        return x.sum()


def leaf(rows=32):
    return torch.randn(rows, 32, requires_grad=True)


def run(steps, budget=None, keep_last=0, *, is_far=False):
    """The positions that stay, for each call of each step. Args: steps: bytes, by call."""
    newest, found, ended = Newest(budget, keep_last), [], (0, 0)
    for step in steps:
        staying = []
        for number, call in enumerate(step):
            if ended[1]:
                newest.begin_call(*ended, min(number, MOST_CALLS))
            held = [
                position
                for position, nbytes in enumerate(call)
                if newest.keeps(min(number, MOST_CALLS), position, nbytes, is_far=is_far)
            ]
            staying.append(held)
            ended = min(number, MOST_CALLS), len(call)
        found.append(staying)
        if budget is not None and keep_last == 0:
            pairs = zip(step, staying, strict=True)
            assert sum(call[p] for call, held in pairs for p in held) <= budget
    return found, newest


def test_the_newest_stay_from_the_second_step_on():
    found, newest = run(3 * [[[4, 4, 4, 2]]], budget=7)
    assert found == [[[]], [[2, 3]], [[2, 3]]]
    assert newest.rest_bytes == 1
    assert not newest.looks


def test_the_last_ones_stay_whatever_they_take():
    assert run(2 * [[[8, 8, 8]]], keep_last=2)[0][-1] == [[1, 2]]
    assert run(2 * [[[8, 8, 8]]], budget=20, keep_last=1)[0][-1] == [[1, 2]]
    assert run(2 * [[[8, 8, 8]]], budget=4, keep_last=1)[0][-1] == [[2]]


def test_the_last_call_of_a_step_has_the_newest():
    assert run(2 * [[[4, 4], [4, 4]]], budget=12)[0][-1] == [[1], [0, 1]]


def test_over_a_link_a_part_is_for_tensors_on_their_way():
    found, newest = run(2 * [[[4] * 20]], budget=40, is_far=True)
    assert found[-1] == [[*range(13, 20)]]
    assert newest.rest_bytes >= 40 // LINK_SHARE
    assert run(2 * [[[4] * 10]], budget=40, is_far=True)[0][-1] == [[*range(10)]]  # nothing leaves


@pytest.mark.parametrize(
    "other",
    [[[4, 4, 5]], [[4, 4]], [[4, 4, 4, 4]], [[4, 4, 4], [4]], [[], [4, 4, 4]]],
    ids=["bytes", "fewer", "more", "a call more", "an empty call"],
)
def test_a_step_that_differs_is_followed_by_one_that_is_recorded(other):
    first = [[4, 4, 4]]
    found, newest = run([first, first, other, other, other], budget=8)
    assert found[1] == [[1, 2]]
    settled, _ = run([other, other, other], budget=8)
    assert found[-1] == settled[-1]
    assert not newest.looks


def test_a_call_less_is_noticed():
    two, one = [[4, 4], [4, 4]], [[4, 4]]
    found, newest = run([two, two, one, one, one], budget=8)
    assert found[1] == [[], [0, 1]]
    assert found[-1] == [[0, 1]]
    assert not newest.looks


def test_what_is_left_for_tensors_on_their_way_counts_larger_ones_that_stay():
    _, newest = run([[[4, 4]], [[4, 4]], [[9, 9]], [[5, 5]]], budget=10)
    assert newest.looks
    assert newest.rest_bytes == 0


def test_calls_without_a_backward_are_bounded():
    _, newest = run([[[4, 4]] * (MOST_CALLS + 50)], budget=8)
    assert len(newest._recorded) <= 2 * MOST_CALLS


def test_the_budget_holds_in_steps_of_any_kind():
    chance = random.Random(0)
    settled = 0
    for _ in range(200):
        kinds = [
            [[chance.randrange(1, 9) for _ in range(chance.randrange(1, 6))] for _ in range(calls)]
            for calls in (1, 2, chance.randrange(1, 4))
        ]
        budget = chance.randrange(30)
        steps = [kinds[0]] * 3 + [chance.choice(kinds) for _ in range(8)] + [kinds[1]] * 3
        found, newest = run(steps, budget, is_far=chance.random() < 0.5)
        fits = sum(map(sum, kinds[1])) <= budget
        assert not fits or found[-1] == [[*range(len(call))] for call in kinds[1]]
        settled += not newest.looks
    assert settled == 200


# ------------------------------------------------------------------ in an engine


def staying(engine, function):
    """Tensors that stayed and that left in a call of a function, and bytes of those that stayed."""
    before = engine.stats
    function()
    after = engine.stats

    def grew(counts, old):
        return counts.get("budget", 0) - old.get("budget", 0)

    return (
        grew(after.kept_by_reason, before.kept_by_reason),
        after.swapped - before.swapped,
        grew(after.kept_bytes_by_reason, before.kept_bytes_by_reason),
    )


@pytest.mark.parametrize("limit", [{"budget": 2 * ONE}, {"keep_last": 2}], ids=["budget", "last"])
def test_slots_take_those_that_leave_and_the_others_stay(limit):
    model, x = Chain(), leaf()
    model(x).backward()
    expected, x.grad = x.grad, None
    with cswap.install(model, **OPTIONS, **limit) as handle:
        counts = []
        for _ in range(6):
            x.grad = None
            counts.append(staying(handle.engine, lambda: model(x).backward()))
            assert x.grad is not None
            assert torch.equal(x.grad, expected)
        places = handle.engine.packer.book.begun.places
    assert counts == [(0, 6, 0)] + 5 * [(2, 4, 2 * ONE)]
    assert [place.slot is not None for place in places] == [True] * 4 + [False] * 2
    assert handle.engine.goes_by_slots


class Twice(Chain):
    """Saves every other result twice."""

    def forward(self, x):
        for _ in range(self.depth):
            x = x.tanh().exp().sin()
        return x.sum()


def test_a_tensor_that_shares_memory_is_not_taken_for_the_next_one():
    model, x = Twice(3), leaf()
    with cswap.install(model, **OPTIONS, budget=2 * ONE) as handle:
        for _ in range(4):
            model(x).backward()
        model(x)
        book = handle.engine.packer.book
        assert book.slots is not None
        shared = [p for p in book.slots if isinstance(p, SharedSlot)]
        assert len(shared) == sum(isinstance(p.slot, SharedSlot) for p in book.begun.places) > 0


def test_two_calls_of_one_model_share_a_budget():
    model, x = Chain(3), leaf()

    def step():
        (model(x) + model(x)).backward()

    with cswap.install(model, **OPTIONS, budget=4 * ONE) as handle:
        counts = [staying(handle.engine, step) for _ in range(5)]
    assert counts == [(0, 6, 0)] + 4 * [(4, 2, 4 * ONE)]


def test_batches_whose_size_changes_always_are_within_the_budget():
    model = Chain()
    with cswap.install(model, **OPTIONS, budget=3 * ONE) as handle:
        counts = [
            staying(handle.engine, lambda n=n: model(leaf(n)).backward())
            for n in (32, 32, 48, 20, 36, 24, 32, 32, 32, 32)
        ]
    assert all(nbytes <= 3 * ONE for *_, nbytes in counts)
    assert sum(n for n, *_ in counts[2:7]) > 0
    assert counts[-1] == (3, 3, 3 * ONE)


class Pooled(nn.Module):
    """The last saved tensor but one is the pool's argument, which backward does not read."""

    def forward(self, x):
        x = x.tanh().sin().cos()
        return functional.max_pool2d(torch.cat([x] * 4, 1) * 2, 2).exp().sum()


def test_a_tensor_that_is_not_held_takes_nothing_of_the_budget():
    model, x = Pooled(), torch.randn(2, 4, 32, 32, requires_grad=True)
    with cswap.install(model, min_bytes=0, budget=4 * x.nbytes) as handle:
        counts = [staying(handle.engine, lambda: model(x).backward()) for _ in range(6)]
        assert handle.stats.by_codec["unread"].count > 0
    assert [nbytes // x.nbytes for *_, nbytes in counts][-2:] == [4, 4]
    assert counts[1][-1] < 4 * x.nbytes  # before the step was recorded once more
