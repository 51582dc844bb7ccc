"""A step whose hooks only mark their times: `cswap.fit.marked_step`."""

from __future__ import annotations

import types
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cswap.engine.packer import Packer
from cswap.fit.marked_step import MarkedStep
from cswap.fit.plain_steps import PlainSteps
from cswap.fit.problem import Times
from cswap.fit.seen import Lap, Step
from tests.fit import test_seen

MARK_S = 0.25
"""Seconds of the host for a mark."""

LONG_S = 1e9
"""Seconds of a plain step, so many that hooks take no longer than their marks."""


class Mark(NamedTuple):
    device_s: float
    came_s: float
    left_s: float


class Watch(test_seen.Watch):
    """Marks at moments that a test sets."""

    def __init__(self):
        self.device_s = self.host_s = 0.0

    def mark(self):  # type: ignore[override]
        came_s = self.host_s
        self.host_s += MARK_S
        return Mark(self.device_s, came_s, self.host_s)

    @staticmethod
    def host_seconds(earlier, later):
        return later.came_s - earlier.left_s


ENGINE: Any = types.SimpleNamespace(pass_through=Packer.pass_through)


def explored(kinds):
    """A step with such laps: "s" a save, "k" a save that stays, "u" a use."""
    laps, moment = [], 0
    for kind in kinds:
        laps.append(Lap(moment, 0, None, None, is_use=kind == "u", stays=kind == "k"))
        moment += kind != "k"
    step = Step(explored=True, laps=laps)
    step.n_moments = moment
    return step


def marked(intervals):
    """A marked step: two saves, one that stays in between; all are used in the reverse order.

    Args:
        intervals: seconds of the device and of the host in front of each hook.
    """
    watch, held = Watch(), []
    step = MarkedStep(ENGINE, watch)
    began = watch.mark()
    watch.host_s = 0.0

    def advance(device_s, host_s):
        watch.device_s += device_s
        watch.host_s += host_s

    for interval in intervals[:3]:
        advance(*interval)
        held.append(step.pack(torch.ones(3)))
    for interval, one in zip(intervals[3:], reversed(held), strict=True):
        advance(*interval)
        assert torch.equal(step.unpack(one), torch.ones(3))
    return step, Step(explored=False, began=began, ended=watch.mark(), watch=watch)


def test_a_host_that_is_ahead_leaves_the_devices_times():
    step, record = marked([(1.0, 0.1)] * 6)
    times: Any = step.times(explored("sksuu"), record, LONG_S)
    # The use of the tensor that stays has no moment; what stays has that of the next one.
    assert list(times.durations) == [1.0, 2.0, 1.0, 2.0]
    assert times.host_ahead == pytest.approx([0.0, 1.8, 2.7, 4.25])
    assert times.step_s == 6.0


def test_where_the_host_is_behind_its_marks_are_no_computation():
    # The device waits for each hook: 0.5 s of the program's host, and the mark before it.
    step, record = marked([(0.5 + MARK_S, 0.5)] * 6)
    times: Any = step.times(explored("sksuu"), record, LONG_S)
    assert times.durations == pytest.approx([0.75, 1.0, 0.5, 1.25])
    assert not times.host_ahead.any()
    assert times.step_s == pytest.approx(6 * 0.75 - 4 * MARK_S)


@pytest.mark.parametrize("of_hook", [1.0, 3.0, 11.0])
def test_hooks_take_as_much_as_the_step_is_longer_than_a_plain_one(of_hook):
    # The device waits for each hook, of which the mark is a part.
    step, record = marked([(0.5 + of_hook * MARK_S, 0.5 + (of_hook - 1) * MARK_S)] * 6)
    plain_s = record.step_s - 4 * of_hook * MARK_S
    times: Any = step.times(explored("sksuu"), record, plain_s)
    hook_s = of_hook * MARK_S
    assert times.step_s == pytest.approx(plain_s, abs=0.01)
    # The first hook, and that of the use without a moment, are not taken out.
    assert times.durations == pytest.approx([0.5 + hook_s, 1.0, 0.5, 1.0 + hook_s], abs=0.01)
    assert not times.host_ahead.any()


@pytest.mark.parametrize("plain_s", [0.0, 1.0])
def test_a_step_is_no_shorter_than_nothing_without_its_hooks(plain_s):
    step, record = marked([(0.5 + MARK_S, 0.5)] * 6)
    times: Any = step.times(explored("sksuu"), record, plain_s)
    assert (times.durations >= 0).all()
    assert times.step_s > 0


def test_a_lead_that_was_lost_is_not_owed():
    step, record = marked([(1.0, 1.0), (0.1, 0.5), *[(1.0, 0.1)] * 4])
    times: Any = step.times(explored("sksuu"), record, LONG_S)
    # The second hook finds the host behind by 0.5 s, which the device has waited for.
    assert times.host_ahead == pytest.approx([0.0, 0.9, 1.8, 3.35])


@pytest.mark.parametrize("kinds", ["", "ss", "skuu", "sksu", "sksuuu", "skusu", "ssksuuu"])
def test_another_step_has_no_times(kinds):
    step, record = marked([(1.0, 0.1)] * 6)
    assert step.times(explored(kinds), record, LONG_S) is None


def test_a_step_without_a_backward_has_none():
    step = MarkedStep(ENGINE, Watch())
    step.pack(torch.ones(3))
    assert step.times(explored("su"), Step(explored=False), LONG_S) is None


def test_a_tensor_that_was_modified_in_place_raises():
    step = MarkedStep(ENGINE, Watch())
    x = torch.ones(3)
    held = step.pack(x)
    x += 1
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        step.unpack(held)


def test_hooks_that_an_interrupt_left_give_it_what_they_kept():
    # An inactive pair packs by `pass_through`, and has this step's unpack.
    step = MarkedStep(ENGINE, Watch())
    x = torch.ones(3)
    assert step.unpack(Packer.pass_through(x)) is x


def test_a_graph_that_lives_on_is_marked_no_more():
    watch = Watch()
    step = MarkedStep(ENGINE, watch)
    held = step.pack(torch.ones(3))
    step.stop()
    for _ in range(9):
        assert torch.equal(step.unpack(held), torch.ones(3))
    assert watch.host_s == MARK_S  # of the one mark before
    assert not step._marks


class Paces:
    """Says of each step whether it looks like a plain one, which takes a second."""

    plain_s = 1.0

    def __init__(self, answers):
        self.answers = list(answers)

    def note_plain(self, _step_s):
        return self.answers.pop(0)


@pytest.mark.parametrize(
    ("answers", "marked_s", "n_steps", "is_known"),
    [
        ([True], [1.4], 3, True),  # marks take time
        ([False, False, True], [1.0], 5, True),
        ([True], [1.6, 1.0], 4, True),  # somebody paused in the marked step
        ([True], [1.6] * 4, 6, False),
        ([False] * 5, [], 6, False),
    ],
)
def test_steps_that_are_not_plain_are_repeated(monkeypatch, answers, marked_s, n_steps, is_known):
    engine: Any = types.SimpleNamespace(sits_out=False, stand_in=None)
    paces: Any = Paces(answers)
    plain = PlainSteps(engine, paces, Watch())
    left = list(marked_s)
    monkeypatch.setattr(MarkedStep, "times", lambda *_: Times(np.ones(1), np.ones(1), left.pop(0)))
    step = Step(explored=True, watch=Watch())
    step.began = step.ended = Mark(0.0, 0.0, 0.0)
    assert plain.begin(1.0, 10, step)
    n = 1
    while not plain.note(step):
        assert engine.sits_out is (engine.stand_in is None)
        n += 1
    assert (n, plain.times is not None) == (n_steps, is_known)
    assert (engine.sits_out, engine.stand_in, paces.answers, left) == (False, None, [], [])
    assert plain.note(step)  # after an interrupt: they have ended


def test_a_problem_takes_its_times():
    from tests.fit.test_solve import random_problem

    problem = random_problem(0, linked=True)
    step, record = marked([(1.0, 0.1)] * 6)
    times: Any = step.times(explored("sksuu"), record, LONG_S)
    over: Any = problem.timed_by(times).over_link
    n = len(times.durations)  # the problem has more moments
    assert (list(over.durations[:n]), over.step_s) == (list(times.durations), times.step_s)
    assert list(over.host_ahead[:n]) == list(times.host_ahead)
    before: Any = problem.over_link
    assert over.link == before.link
    alone = random_problem(0)
    assert alone.timed_by(times).over_link is None
