"""The times and bytes of a step, from marks: `cswap.fit.seen.Step`."""

from __future__ import annotations

import types
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

from cswap.fit.exploration import Exploration
from cswap.fit.link_rates import LinkRates
from cswap.fit.pace import AIM, LEAST_SHARE, TIMED, Pace
from cswap.fit.saved import Key, Saved
from cswap.fit.seen import LEAST_TIMED, Lap, Step


class Mark(NamedTuple):
    device_s: float
    host_s: float = 0.0


class Watch:
    """A device's clock and a host's, told by hand."""

    @staticmethod
    def is_on():
        return True

    @staticmethod
    def mark():
        raise AssertionError("nobody marks anything here")

    @staticmethod
    def get_ahead(_seconds):
        raise AssertionError("nobody waits here")

    @staticmethod
    def seconds(earlier, later):
        return later.device_s - earlier.device_s

    @staticmethod
    def host_seconds(earlier, later):
        return later.host_s - earlier.host_s


def a_step():
    """Two saves and two uses: 1, 2, 4 and 8 s of computation before them; the engine takes 0.5."""
    laps, at_s = [], 10.0
    for moment, seconds in enumerate((1.0, 2.0, 4.0, 8.0)):
        entered = Mark(at_s + seconds, seconds / 2)
        at_s += seconds + 0.5
        laps.append(Lap(moment, 100 * (moment + 1), entered, Mark(at_s)))
    step = Step(explored=True, watch=Watch(), laps=laps, began=Mark(10.0), ended=Mark(at_s + 16))
    step.n_moments = 4
    return step


def test_each_moment_has_the_computation_in_front_of_it():
    step = a_step()
    assert list(step.durations()) == [1.0, 2.0, 4.0, 8.0]
    assert (step.step_s, step.hooks_s) == (33.0, 2.0)


def test_tensors_that_stay_belong_to_the_next_moment():
    step = a_step()
    kept = step.laps[1]._replace(moment=2)  # it had no moment of its own
    step.laps[1:] = [kept, *(lap._replace(moment=lap.moment) for lap in step.laps[2:])]
    assert list(step.durations()) == [1.0, 0.0, 6.0, 8.0]


def test_the_host_is_ahead_by_the_difference_between_hooks():
    # Not before the first hook, where the host may have waited for the last step.
    assert list(a_step().host_ahead()) == [0.0, 1.0, 3.0, 7.0]


def test_a_host_that_is_slower_is_not_ahead():
    step = a_step()
    slow = step.laps[1].entered
    step.laps[1] = step.laps[1]._replace(entered=slow._replace(host_s=4.0))
    assert list(step.host_ahead()) == [0.0, 0.0, 0.0, 4.0]


def test_bytes_of_others_are_those_after_a_moment():
    step = a_step()
    assert list(step.other_bytes()) == [200.0, 300.0, 400.0, 400.0]
    del step.laps[2]  # the third moment had no lap of its own
    assert list(step.other_bytes()) == [200.0, 200.0, 400.0, 400.0]


def test_tensors_in_use_are_no_others():
    # 300 bytes at the second moment, of which a tensor that is used then has 60.
    used = Saved((Key("a", torch.float32, 0),), 60, (), 0, 1, 1)
    chooser: Any = types.SimpleNamespace(link=LinkRates(1.0, 1.0, 1.0), explore=lambda: None)
    over: Any = Exploration(chooser)._over_link(a_step(), [used])
    assert list(over.other_bytes) == [0.0, 40.0, 200.0, 200.0]  # beyond the least, which is 200
    assert (list(over.durations), over.step_s) == ([1.0, 2.0, 4.0, 8.0], 31.0)


def test_a_step_that_has_not_ended_takes_no_time():
    assert Step(explored=False).step_s == 0.0


def timed(seconds, *, looked=False, hooks_s=0.0):
    laps = [Lap(0, 0, Mark(0.0), Mark(hooks_s))] if hooks_s else []
    return Step(
        explored=False,
        looked=looked,
        watch=Watch(),
        laps=laps,
        began=Mark(0.0),
        ended=Mark(seconds),
    )


def pace_after(kind, step_s, *, plain=None, looked_s=2.0, hooks_s=0.5, added_s=0.1):
    pace = Pace(kind)
    if plain is not None:
        pace.plain_s = plain
        assert pace.note_plain(plain)
    pace.begin_plan(added_s)
    for _ in range(LEAST_TIMED):
        pace.note(timed(step_s), obeys=True)
    pace.note(timed(looked_s, looked=True, hooks_s=hooks_s), obeys=True)
    return pace


def test_a_plain_step_says_how_long_one_takes():
    pace = pace_after("cuda", 1.2, plain=1.0)
    assert pace.plain_s == 1.0
    assert pace.changes(1.1)  # at the first look: a GPU is nobody else's
    assert pace.share == pytest.approx(AIM * 0.1 / 0.2 / 2)  # the rest would be none
    assert pace.allowed_s(1.1) == pytest.approx(0.1 * AIM * 0.1 / 0.2 / 2)


def test_a_smaller_share_lies_between_two_explanations():
    pace = pace_after("cuda", 1.14, plain=1.0)
    assert pace.changes(1.1)
    assert pace.share == pytest.approx((AIM * 0.1 / 0.14 + 1 - (1.4 - AIM)) / 2)


def test_a_gpu_that_is_far_too_slow_does_not_give_up():
    pace = pace_after("cuda", 9.0, plain=1.0)
    assert pace.changes(1.1)
    assert pace.share == LEAST_SHARE


def test_the_share_of_a_gpu_rises_by_what_was_missed():
    pace = pace_after("cuda", 1.08, plain=1.0)
    pace.share = 0.5
    assert pace.changes(1.1)
    assert pace.share == pytest.approx(0.5 * AIM * 0.1 / 0.08)


@pytest.mark.parametrize(
    "longer",
    [
        lambda share: 1.05 + share / 6,  # the hooks take 5 %
        lambda share: 1.02 + share / 5 if share < 0.3 else 1.17,  # the host is slower from there on
    ],
)
def test_the_share_of_a_gpu_comes_to_rest_below_the_one_that_was_too_slow(longer):
    pace, shares = pace_after("cuda", longer(1.0), plain=1.0), []
    for _ in range(200):
        shares.append(pace.share)
        if pace.changes(1.1):
            pace.begin_plan(0.1)
        for _ in range(LEAST_TIMED):
            pace.note(timed(longer(pace.share)), obeys=True)
        pace.note(timed(2.0, looked=True, hooks_s=0.5), obeys=True)
    settled = shares[100:]
    assert sum(a != b for a, b in pairwise(settled)) <= 4
    good = [share for share in settled if longer(share) <= 1.102]
    assert len(good) >= 98
    assert min(good) > 0.2


def test_a_gpu_takes_no_other_plan_for_a_little_more_time():
    pace = pace_after("cuda", 1.14, plain=1.0)
    assert pace.changes(1.1)  # a share of 1 was too much
    pace.begin_plan(0.1)
    pace.share = 0.9
    for _ in range(LEAST_TIMED):
        pace.note(timed(1.08), obeys=True)
    pace.note(timed(2.0, looked=True, hooks_s=0.5), obeys=True)
    assert not pace.changes(1.1)
    assert pace.share == 0.9


def test_without_one_a_plain_step_takes_no_longer_than_the_others_less_the_plan():
    assert pace_after("cuda", 1.2).plain_s == pytest.approx(1.1)
    assert pace_after("cuda", 1.2, looked_s=1.5).plain_s == pytest.approx(1.0)
    # On a CPU the time in the hooks is known.
    assert pace_after("cpu", 1.2).plain_s == pytest.approx(1.5)


def test_a_cpu_is_asked_several_times():
    pace = pace_after("cpu", 3.0)
    assert not pace.changes(1.1)


def test_steps_in_which_the_engine_learns_do_not_count():
    pace = Pace("cuda")
    for n in range(2 * TIMED["cuda"]):
        pace.note(timed(1.0 if n % 2 else 5.0), obeys=True)
    assert pace.step_s == 1.0


def test_a_step_that_is_hardly_too_slow_is_worth_no_other_plan():
    assert not pace_after("cuda", 1.1015, plain=1.0).changes(1.1)
    assert pace_after("cuda", 1.106, plain=1.0).changes(1.1)


@pytest.mark.parametrize(
    ("seconds", "counts"),
    [(0.9, True), (1.05, True), (0.35, True), (0.2, False), (1.2, False), (30.0, False)],
)
def test_a_pause_or_a_forward_alone_is_no_plain_step(seconds, counts):
    pace = Pace("cuda")
    pace.plain_s = 1.0  # of an explored step, without the hooks
    assert pace.note_plain(seconds) is counts
    assert (pace.plain_s, pace.was_plain) == ((seconds, True) if counts else (1.0, False))


def test_a_plan_that_was_thought_to_take_longer_leaves_a_plain_step():
    pace = pace_after("cuda", 0.25, added_s=0.3, looked_s=0.5, hooks_s=0.3)
    assert pace.plain_s == pytest.approx(0.3 * 0.2)


def test_a_step_that_saves_nothing_has_neither_moments_nor_bytes():
    step = a_step()
    step.n_moments = 0
    assert (len(step.durations()), len(step.other_bytes())) == (0, 0)


def test_moments_without_a_lap_have_no_time():
    step = a_step()
    step.n_moments = 6
    assert np.array_equal(step.durations(), [1.0, 2.0, 4.0, 8.0, 0.0, 0.0])
