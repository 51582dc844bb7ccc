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
