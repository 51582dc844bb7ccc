"""The share of the allowed time for the next plan, on a busy machine and on an idle one."""

from __future__ import annotations

import math
import random
import statistics
from types import SimpleNamespace
from typing import Any

import pytest

from cswap.fit.pace import ALLOWED, LEAST_SHARE, Pace

SLOWDOWN = 1.1
AS_FORESEEN, TOO_LONG = 0.1, 0.2
"""Seconds that a plan adds to a plain step of one second."""
LOOK_EVERY = 8
FIRST_LOOKS = 4
HOOKS = 0.01
"""Share of a plain step that no plan knows."""


def trained(seed, *, noise, off, steps=200):
    """Train for a while under plans that take ``off`` times as long as foreseen.

    Returns:
        The share in the end, the mean time of the later steps over plain's, the number of plans.
    """
    drawn = random.Random(seed)
    pace = Pace("cpu")
    pace.plain_s = 1.0
    pace.begin_plan(0.0)
    drift, since, plans, times = 0.0, 0, 1, []
    allowed = ALLOWED["cpu"] * (SLOWDOWN - 1)

    def disturbed(seconds):
        busy = drawn.gauss(0, noise) + abs(drawn.gauss(0, noise / 2))
        return seconds * math.exp(drift + busy)

    for _ in range(steps):
        drift = 0.8 * drift + drawn.gauss(0, noise / 2)
        looked = since < FIRST_LOOKS or since % LOOK_EVERY == 0
        took = 1 + HOOKS + pace.share * allowed * off
        times.append(took)
        step: Any = SimpleNamespace(
            looked=looked, changed=False, step_s=disturbed(took), plain_s=disturbed(1.0)
        )
        pace.note(step, obeys=True)
        since += 1
        if pace.changes(SLOWDOWN):  # which is asked in every step
            pace.begin_plan(0.0)
            since, plans = 0, plans + 1
    return pace.share, statistics.fmean(times[30:]), plans


def middle(noise, off):
    """Medians of many trainings."""
    found = [trained(seed, noise=noise, off=off) for seed in range(100)]
    return [statistics.median(column) for column in zip(*found, strict=True)]


@pytest.mark.parametrize("noise", [0.02, 0.08])
def test_a_plan_that_takes_as_long_as_foreseen_keeps_its_share(noise):
    share, took, plans = middle(noise, off=1.0)
    assert share >= 0.4
    assert took <= SLOWDOWN
    assert plans <= 4


@pytest.mark.parametrize("noise", [0.02, 0.08])
def test_a_plan_that_takes_four_times_as_long_gets_less(noise):
    share, took, _ = middle(noise, off=4.0)
    assert LEAST_SHARE <= share <= 0.25
    assert took <= SLOWDOWN


def test_a_plan_that_takes_less_gets_more_on_an_idle_machine():
    share, took, _ = middle(0.02, off=0.7)
    assert share >= 0.9
    assert took <= SLOWDOWN
    share, took, plans = middle(0.02, off=0.3)
    assert share == 1.0
    assert took <= SLOWDOWN
    assert plans <= 2  # and not by small steps


def trained_on_a_gpu(busy, adds, *, has_room=True, steps=400):
    """Train on a GPU on which all steps take ``busy(n)`` times as long in the n-th step.

    Args:
        busy: see above.
        adds: seconds that a plan of the whole share adds, on an idle machine.
        has_room: whether plain steps may run again.
        steps: how many.

    Returns:
        The pace, the time of each step with a plan over that of a plain one at that moment, the
        number of plans, and how often plain steps have run again.
    """
    pace, plain = Pace("cuda"), [False]
    pace.plain_s = 1.1 * busy(0)
    assert pace.note_plain(busy(0))
    pace.begin_plan(SLOWDOWN - 1)
    since, plans, again, times = 0, 1, 0, []

    def time_plain():
        plain[0] = has_room
        return has_room

    def changes():
        nonlocal since, plans
        if pace.changes(SLOWDOWN, time_plain):
            pace.begin_plan(pace.allowed_s(SLOWDOWN))
            since, plans = 0, plans + 1

    for n in range(steps):
        if plain[0]:
            plain[0], again = False, again + 1
            assert pace.note_plain(busy(n))
            pace.plain_again()
            changes()
            continue
        took = busy(n) * (1 + adds * pace.share * pace.plain_s / busy(n))
        times.append(took / busy(n))
        looked = since >= LOOK_EVERY and since % LOOK_EVERY == 0
        step: Any = SimpleNamespace(
            looked=looked, changed=False, step_s=took, plain_s=busy(n) * 1.02
        )
        pace.note(step, obeys=True)
        since += 1
        changes()
    return pace, times, plans, again


def test_a_gpu_on_which_all_steps_take_longer_keeps_its_plan():
    pace, _, plans, again = trained_on_a_gpu(lambda n: 1.0 + 0.3 * (n > 50), AS_FORESEEN)
    assert (pace.share, plans, again, pace.plain_s) == (1.0, 1, 1, 1.3)


def test_a_plan_that_is_too_slow_on_a_gpu_gets_less_time():
    for busy in (1.0, 1.3):
        pace, times, plans, again = trained_on_a_gpu(
            lambda n, busy=busy: 1.0 + (busy - 1) * (n > 50), TOO_LONG
        )
        assert pace.share < 0.7
        assert again >= 1
        assert plans > 1
        assert pace.plain_s == busy
        assert statistics.fmean(times[200:]) <= SLOWDOWN * 1.01


def test_where_a_gpu_has_no_room_for_plain_steps_the_first_ones_count():
    pace, _, plans, again = trained_on_a_gpu(
        lambda n: 1.0 + 0.3 * (n > 50), AS_FORESEEN, has_room=False
    )
    assert (again, pace.plain_s) == (0, 1.0)
    assert plans > 1
    assert pace.share < 1


def test_a_gpu_that_is_idle_again_gives_plans_no_more_time_than_allowed():
    """A plan gets more time by a plain step of today, and not by one of the busy machine."""
    pace, times, _, again = trained_on_a_gpu(
        lambda n: 1.0 + 0.5 * (20 < n < 60), TOO_LONG, steps=800
    )
    assert again > 1
    assert pace.plain_s == 1.0
    assert statistics.fmean(times[400:]) <= SLOWDOWN * 1.01


def test_a_plain_step_that_takes_longer_than_one_with_a_plan_does_not_count():
    pace = Pace("cuda")
    pace.plain_s = 1.0
    assert pace.note_plain(1.0)
    for _ in range(4):
        step: Any = SimpleNamespace(looked=False, changed=False, step_s=1.1, plain_s=1.0)
        pace.note(step, obeys=True)
    assert not pace.note_plain(1.2)
    assert not pace.note_plain(0.1)  # without a backward
    assert pace.plain_s == 1.0
    assert pace.note_plain(0.9)
