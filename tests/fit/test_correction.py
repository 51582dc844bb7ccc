"""What measured peaks do to the next plan."""

from __future__ import annotations

from collections import Counter

import pytest

from cswap.fit.correction import MARGIN, MOST_LOOSENED, Correction, Look
from cswap.fit.problem import FitPlan


def plan(peak_bytes, added_s=1.0):
    return FitPlan({}, peak_bytes, added_s, 0, Counter())


def look(made, measured):
    return Look(made, measured, limit=1000, other=200.0)


def test_a_peak_above_the_limit_leaves_less_room_by_the_excess():
    correction = Correction(MARGIN)
    assert correction.room(1000, 200.0) == pytest.approx(800 * (1 - MARGIN))
    correction.too_much(look(plan(780), 1050))
    assert not correction.held
    assert correction.room(1000, 200.0) < 800 * (1 - MARGIN) - (1050 - 980)


def test_bytes_that_the_program_holds_at_a_moment_need_no_margin():
    # The logits of a language model, say: the plan leaves a share of the rest free, and a peak is
    # far below the limit if it is so by a share of the rest.
    correction = Correction(MARGIN)
    assert correction.room(1000, 200.0, 700.0) == pytest.approx(800 - 100 * MARGIN)
    assert correction.room(1000, 200.0, 900.0) == 800  # which is above the limit
    below = Look(plan(775), measured=970, limit=1000, other=200.0, besides=700.0)
    assert not correction.may_loosen(below._replace(besides=0.0))
    assert correction.may_loosen(below)


def test_a_peak_far_below_the_limit_gives_room_a_few_times():
    correction = Correction(MARGIN)
    for _ in range(MOST_LOOSENED):
        before = correction.room(1000, 200.0)
        assert correction.may_loosen(look(plan(700 - correction.bias), 800))
        assert correction.room(1000, 200.0) > before
    assert not correction.may_loosen(look(plan(700 - correction.bias), 800))


def test_nothing_is_loosened_near_the_limit_or_where_nothing_is_gained():
    correction = Correction(MARGIN)
    assert not correction.may_loosen(look(plan(790), 980))
    assert not correction.may_loosen(look(plan(700, added_s=0.0), 800))
    assert not correction.may_loosen(look(plan(600), 850))  # above its prediction
    assert correction.bias == 0


def test_a_looser_plan_that_is_too_loose_gives_way_to_the_one_before():
    correction = Correction(MARGIN)
    first, second, third = plan(700), plan(790), plan(760)
    assert correction.may_loosen(look(first, 800))
    loose = correction.room(1000, 200.0)
    assert correction.predicted(first, 200.0) == 800  # as it was measured
    correction.too_much(look(second, 1010))
    assert correction.held == [first]
    assert correction.predicted(first, 200.0) == 800
    # Another plan is made: between the two.
    assert correction.go_back()
    assert 700 < correction.room(1000, 200.0) < loose - (1010 - 890)
    assert not correction.may_loosen(look(first, 800))  # it would be the same again
    # That is the last one.
    correction.too_much(look(third, 1005))
    assert correction.held == [first]
    assert not correction.go_back()
    correction.too_much(look(first, 1010))
    assert not correction.held
    assert correction.bias == pytest.approx(1010 - 900 + MARGIN * 400)


def test_a_plan_that_is_too_much_later_is_tightened_by_what_is_known_of_it():
    # It was to be loosened, but no faster plan was found.
    correction = Correction(MARGIN)
    first = plan(700)
    assert correction.may_loosen(look(first, 800))
    correction.too_much(look(first, 1010))
    assert correction.bias == pytest.approx(1010 - 900 + MARGIN * 400)
