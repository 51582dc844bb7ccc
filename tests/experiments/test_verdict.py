"""The accuracy verdict: on synthetic losses it must find a loss, and find that there is none."""

from __future__ import annotations

import math
from collections import Counter
from functools import cache

import numpy as np
import pytest

pytest.importorskip("scipy")

from cswap.experiments.accuracy.pilot import SHARE, margin_of
from cswap.experiments.accuracy.verdict import (
    EQUAL,
    FEWEST_SEEDS,
    UNDECIDED,
    WORSE,
    interval,
    verdict,
)

DRAWS = 1000
SEED_SPREAD = 1.0
"""Standard deviation that the seed causes in the loss. The stated margin is SHARE of it."""

PAIR_SPREAD = 0.25
"""Standard deviation of the difference between two runs from one seed: a seed decides weights,
batches and dropout masks of both, so that most of its effect is common to them."""


def losses(n_seeds, loss, pair_spread=PAIR_SPREAD):
    """DRAWS experiments: losses under a policy that costs ``loss``, and of plain training."""
    random = np.random.default_rng(n_seeds)
    off = 3.0 + SEED_SPREAD * random.standard_normal((DRAWS, n_seeds))
    mine = off + loss + pair_spread * random.standard_normal((DRAWS, n_seeds))
    return zip(mine.tolist(), off.tolist(), strict=True)


@cache
def shares(n_seeds, loss, **options):
    margin = SHARE * SEED_SPREAD
    found = Counter(verdict(mine, off, margin) for mine, off in losses(n_seeds, loss, **options))
    return {word: found[word] / DRAWS for word in (EQUAL, WORSE, UNDECIDED)}


def test_a_loss_of_one_standard_deviation_is_found_at_five_seeds():
    assert shares(5, SEED_SPREAD)[WORSE] >= 0.9


def test_no_loss_is_equal_within_the_stated_margin_at_five_seeds():
    assert shares(5, 0.0)[EQUAL] >= 0.9


@pytest.mark.parametrize(("loss", "word"), [(SEED_SPREAD, WORSE), (0.0, EQUAL)])
@pytest.mark.parametrize("pair_spread", [PAIR_SPREAD, 0.5, math.sqrt(2.0)])
def test_more_seeds_never_make_the_verdict_weaker(loss, word, pair_spread):
    # sqrt(2): the pairs have nothing in common. There five seeds rarely decide; more do.
    right = [shares(n, loss, pair_spread=pair_spread)[word] for n in (5, 10, 20, 80)]
    assert right == sorted(right)
    assert right[-1] >= 0.8


@pytest.mark.parametrize("n_seeds", [5, 10, 40])
@pytest.mark.parametrize("pair_spread", [PAIR_SPREAD, math.sqrt(2.0)])
def test_wrong_verdicts_are_as_rare_as_the_interval_says(n_seeds, pair_spread):
    # Each end of the interval is wrong in one of twenty; the rest is chance of DRAWS draws.
    rare = 0.05 + 3 * math.sqrt(0.05 * 0.95 / DRAWS)
    margin = SHARE * SEED_SPREAD
    assert shares(n_seeds, 0.0, pair_spread=pair_spread)[WORSE] <= rare
    assert shares(n_seeds, margin, pair_spread=pair_spread)[EQUAL] <= rare
    for loss in (margin / 2, margin):  # losses that would not matter, however certain they are
        assert shares(n_seeds, loss, pair_spread=pair_spread)[WORSE] <= rare


def test_fewer_seeds_decide_nothing():
    off = [1.0, 1.1, 0.9, 1.05, 0.95]
    much_worse = [x + 10 for x in off]
    assert verdict(much_worse[:4], off[:4], 0.1) == UNDECIDED
    assert verdict(off[:4], off[:4], 0.1) == UNDECIDED
    assert FEWEST_SEEDS == 5
    assert verdict(much_worse, off, 0.1) == WORSE


def test_a_loss_within_the_margin_is_equal_even_if_it_is_certain():
    off = [1.0, 1.1, 0.9, 1.05, 0.95]
    mine = [x + d for x, d in zip(off, (0.010, 0.011, 0.009, 0.010, 0.011), strict=True)]
    found = interval(mine, off)
    assert found.low is not None
    assert found.low > 0
    assert verdict(mine, off, 0.02) == EQUAL
    assert found.high is not None
    assert found.low < 0.01 < found.high
    assert verdict(mine, off, 0.01) == UNDECIDED
    assert verdict(mine, off, 0.009) == WORSE


def test_without_a_margin_only_the_same_losses_are_equal():
    off = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert verdict(off, off, None) == EQUAL
    mine = [x + d for x, d in zip(off, (1e-6, -1e-6, 0.0, 1e-6, -1e-6), strict=True)]
    assert verdict(mine, off, None) == UNDECIDED
    assert verdict([x + 0.01 for x in off], off, None) == WORSE


def test_vit_int4_of_the_earlier_three_seeds_does_not_pass():
    # Worse on three of three seeds. The verdict of that time was "within seed spread".
    differences = [0.067, 0.036, 0.065]
    off = [1.75, 1.77, 1.05]
    mine = [x + d for x, d in zip(off, differences, strict=True)]
    assert verdict(mine, off, 0.017) == UNDECIDED
    assert verdict([*mine, 1.58, 1.60], [*off, 1.53, 1.55], 0.017) == WORSE


def test_the_interval_is_that_of_a_paired_t_test():
    from scipy import stats

    mine, off = [1.3, 0.9, 1.7, 1.1, 1.45], [1.0, 1.0, 1.2, 1.15, 1.3]
    found = interval(mine, off)
    theirs = stats.ttest_rel(mine, off).confidence_interval(0.9)
    assert (found.low, found.high) == pytest.approx((theirs.low, theirs.high))


@pytest.mark.parametrize("wrong", [math.nan, math.inf])
def test_a_run_that_diverged_is_worse(wrong):
    off = [1.0, 1.1, 0.9, 1.05, 0.95]
    assert verdict([*off[:4], wrong], off, 0.1) == WORSE
    assert verdict(off, [*off[:4], wrong], 0.1) == UNDECIDED
    found = interval([*off[:4], wrong], off)
    assert math.isnan(found.mean)
    assert (found.low, found.high, found.spread) == (None, None, None)


def test_the_margin_is_half_the_pilot_runs_spread():
    assert margin_of([1.0, 3.0]) == pytest.approx(0.71)  # SD sqrt(2), two digits
    assert margin_of([2.0, 2.0]) == 0.0
