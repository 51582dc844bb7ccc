"""Plans over a link, against cases done by hand and exhaustive search."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from cswap.fit.goal import TOLERANCE
from cswap.fit.greedy import Search, greedy
from cswap.fit.link_program import PACK_S
from cswap.fit.link_rates import LinkRates
from cswap.fit.problem import MOST_MOMENTS, Problem, slots
from cswap.fit.saved import Key, Need, Saved, Way
from cswap.fit.solve import seconds_of, within_bytes, within_time
from cswap.fit.way_program import WayProgram, undominated, useful
from tests.fit.test_solve import LINK, chosen, over_link, random_problem

pytest.importorskip("scipy")

MIB = 1 << 20
MOMENTS = 20


def saved(i, nbytes, born, use, *ways):
    return Saved((Key(f"m{i}", torch.float32, 0),), nbytes, ways, born, use, use)


def solved(problem, limit):
    """The program's own plan: tensors on their way are a flow of bytes, and take its bytes."""
    return WayProgram(problem).solve(limit_bytes=limit, limit_s=math.inf)


FIRST = saved(9, 1, 10, 11, Way("keep", 1, 0.0))
"""That backward uses first: nothing comes back before that."""


def of_others(plan):
    """Actions of the plan, without that of `FIRST`."""
    return plan.counts - Counter(keep=1)


def tensors_that_have_to_leave(seconds, *, host_s=0.0, limit=200 * MIB, ahead=None, **options):
    """The plan of two tensors, 64 MiB each at moments 0 to 19, that have no room in the middle.

    A tensor that was copied in part is held as a whole: so the limit has room for another one.
    """
    held = np.zeros(MOMENTS)
    held[10] = 136 * MIB
    ways = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB, host_s=host_s)
    over = over_link(MOMENTS, seconds, other_bytes=held, **options)
    if ahead is not None:
        over = replace(over, host_ahead=np.array(ahead))
    return solved(
        Problem([FIRST, *(saved(i, 64 * MIB, 0, 19, *ways) for i in (0, 1))], over), limit
    )


OUT_S, BACK_S = 64 * MIB / LINK.out, 64 * MIB / LINK.back


@pytest.mark.parametrize(
    ("seconds", "added_s"),
    [
        (0.2, 0.0),
        # There is no room for one that waits, so they leave in one slot, and come back in one.
        (0.001, 2 * OUT_S + 2 * BACK_S - 0.002),
    ],
)
def test_computation_hides_as_much_as_the_link_carries_in_its_time(seconds, added_s):
    plan = tensors_that_have_to_leave(seconds)
    assert of_others(plan) == {"raw": 2}
    assert plan.added_s == pytest.approx(added_s, abs=0.003)
    assert 64 * MIB <= plan.under_way_bytes <= 64 * MIB * 1.001


@pytest.mark.parametrize(("limit_mib", "ways"), [(199, None), (240, {"raw": 3}), (273, {"zvc": 3})])
def test_memory_that_encodings_pass_through_counts_once(limit_mib, ways):
    held = np.zeros(MOMENTS)
    held[10] = 136 * MIB
    way = Way("zvc", 0, 1e-4, link_bytes=8 * MIB, passing_bytes=48 * MIB)
    three = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB), way
    over = over_link(MOMENTS, 0.001, other_bytes=held)  # in which no raw tensor leaves in time
    tensors = [saved(i, 64 * MIB, 2 * i, 19 - 2 * i, *three) for i in range(3)]
    problem = Problem([FIRST, *tensors], over)
    # At moment 10: the others, a part of the largest tensor that moves, and tensors that wait; of
    # encodings, besides 48 MiB for all.
    plan = within_bytes(problem, limit_mib * MIB)
    assert (None if plan is None else of_others(plan)) == ways
    if plan is not None:
        assert (plan.added_s < 0.02) == ("zvc" in plan.counts)
        assert plan.under_way_bytes <= 2 * 64 * MIB  # memory that encodings pass through is apart


def test_the_greedy_search_counts_what_tensors_take_on_their_way():
    held = np.zeros(MOMENTS)
    held[10] = 136 * MIB
    way = Way("zvc", 0, 1e-4, link_bytes=8 * MIB, passing_bytes=48 * MIB)
    ways = Way("keep", 64 * MIB, 0.0), way
    over = over_link(MOMENTS, 0.001, other_bytes=held)
    problem = Problem([saved(i, 64 * MIB, 0, 19, *ways) for i in (0, 1)], over)
    search = Search(problem)
    search.ways = {0: way, 1: way}
    plan = search.plan()
    assert plan.under_way_bytes == 2 * 64 * MIB  # wherever they are
    assert plan.peak_bytes == (136 + 2 * 64 + 48) * MIB
    # Memory that encodings pass through is not worth it for a small tensor alone, but for many.
    small = Way("keep", 8 * MIB, 0.0), Way("zvc", MIB, 1e-6, passing_bytes=12 * MIB)
    large = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 1e-3)
    problem = Problem([saved(0, 8 * MIB, 0, 19, *small), saved(1, 64 * MIB, 0, 19, *large)], over)
    assert greedy(problem, 146 * MIB, math.inf).counts == {"keep": 1, "raw": 1}
    many = [saved(n, 8 * MIB, n, 19 - n, *small) for n in range(9)]
    assert greedy(Problem(many, over_link(MOMENTS, 0.001)), 60 * MIB, math.inf).counts["zvc"] > 3


def test_the_host_counts_where_it_is_no_longer_ahead():
    hidden = tensors_that_have_to_leave(0.2, host_s=0.02, host_ahead_s=0.05)
    assert hidden.added_s == pytest.approx(0.0, abs=1e-6)
    shown = tensors_that_have_to_leave(0.2, host_s=0.02, host_ahead_s=0.01)
    assert shown.added_s == pytest.approx(0.03, abs=1e-6)


def test_a_host_that_is_ahead_later_is_late_before():
    # Part of its work for a tensor is done where the tensor is saved: at the first moment.
    late = [PACK_S / 2, *[1.0] * (MOMENTS - 1)]
    plan = tensors_that_have_to_leave(0.2, host_s=0.02, ahead=late)
    assert plan.added_s == pytest.approx(2 * PACK_S - PACK_S / 2, rel=0.02)
    short = tensors_that_have_to_leave(0.2, host_s=PACK_S, ahead=late)
    assert short.added_s == pytest.approx(2 * PACK_S / 2 - PACK_S / 2, rel=0.02)


def test_operators_that_run_again_give_the_host_time():
    held = np.zeros(MOMENTS)
    held[10] = 136 * MIB
    ways = Way("keep", 64 * MIB, 0.0), Way("remat", 0, 0.03, host_s=0.02)
    over = over_link(MOMENTS, 0.02, other_bytes=held, host_ahead_s=0.01)
    plan: Any = within_bytes(Problem([saved(0, 64 * MIB, 0, 19, *ways)], over), 150 * MIB)
    assert plan.counts == {"remat": 1}
    assert plan.added_s == pytest.approx(0.03, abs=1e-6)  # and not 0.03 + 0.02 - 0.01


def test_copies_out_and_back_at_a_time_slow_each_other_down():
    # Two tensors come back in the slots in which two others leave.
    held = np.zeros(MOMENTS)
    held[[6, 16]] = 136 * MIB
    ways = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB)
    four = [saved(i, 64 * MIB, 0, 13, *ways) for i in (0, 1)]
    four += [saved(i, 64 * MIB, 12, 19, *ways) for i in (2, 3)]

    def added_s(both):
        link = LinkRates(1e9, 1e9, both)
        over = replace(over_link(MOMENTS, 0.1, other_bytes=held), link=link)
        plan: Any = solved(Problem([FIRST, *four], over), 263 * MIB)
        assert of_others(plan) == {"raw": 4}
        return plan.added_s

    assert added_s(0.5e9) > added_s(1e9) + 0.01


def test_nothing_comes_back_before_backward_begins():
    # Two tensors leave and are the first that backward uses: the computation waits for both.
    held = np.zeros(MOMENTS)
    held[10] = 136 * MIB
    ways = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB)
    two = [saved(i, 64 * MIB, 0, 19, *ways) for i in (0, 1)]
    plan: Any = solved(Problem(two, over_link(MOMENTS, 0.2, other_bytes=held)), 200 * MIB)
    assert plan.counts == {"raw": 2}
    assert plan.added_s == pytest.approx(2 * BACK_S, abs=1e-6)


def test_moments_of_tensors_that_never_move_make_no_slots():
    ways = Way("keep", MIB, 0.0), Way("raw", 0, 0.0, link_bytes=MIB)
    n = 4 * MOST_MOMENTS
    moving = [saved(i, MIB, i, n - 1 - i, *ways) for i in range(0, MOST_MOMENTS, 2)]
    still = [saved(i, MIB, i, n - 1 - i, ways[0]) for i in range(1, 2 * MOST_MOMENTS, 2)]
    found = Problem([*moving, *still], over_link(n, 1e-3)).slots
    assert len(found) <= MOST_MOMENTS + 2
    assert not {s.born for s in still} & set(found)


def test_nothing_leaves_where_all_fits():
    plan = tensors_that_have_to_leave(0.01, limit=265 * MIB)
    assert (plan.counts, plan.added_s, plan.under_way_bytes) == ({"keep": 3}, 0.0, 0)


def test_of_small_tensors_two_may_always_be_under_way():
    ways = Way("keep", MIB, 0.0), Way("raw", 0, 0.0, link_bytes=MIB)
    many = [saved(i, MIB, i, 399 - i, *ways) for i in range(200)]
    problem = Problem(many, over_link(400, 1.0))
    plan = within_bytes(problem, 100 * MIB)
    assert plan is not None
    assert plan.counts["keep"] == 97
    assert plan.under_way_bytes == 3 * MIB  # and one that is copied in part
    program: Any = WayProgram(problem)
    nothing_waits = np.zeros(len(program._variables) + 2 + program._link.n_columns)
    nothing_waits[: len(program._variables)] = [v.way.action == "raw" for v in program._variables]
    assert program._plan(nothing_waits).under_way_bytes == 3 * MIB


def test_one_tensor_alone_gains_nothing():
    ways = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB)
    plan = within_time(Problem([saved(0, 64 * MIB, 0, 19, *ways)], over_link(MOMENTS, 1.0)), 1.0)
    assert plan.counts == {"keep": 1}


def test_no_more_leaves_than_the_time_allows():
    ways = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB)
    ten = [saved(i, 64 * MIB, i, 39 - i, *ways) for i in range(10)]

    def plan(seconds, limit_s):
        return within_time(Problem(ten, over_link(40, seconds)), limit_s)

    everything, nothing = plan(2 * OUT_S, 0.0), plan(0.0, 0.0)
    assert everything.counts["raw"] == 9  # the last is needed at once
    assert nothing.counts["raw"] == 0
    hidden, stalled = plan(OUT_S / 4, 0.0), plan(OUT_S / 4, 6 * OUT_S)
    assert 0 < hidden.counts["raw"] < stalled.counts["raw"] < 9


# Seed 4 is the quickest.
@pytest.mark.parametrize(
    "seed", [4, *(pytest.param(s, marks=pytest.mark.slow) for s in (0, 1, 2, 3, 5))]
)
def test_the_solver_finds_the_best_plan_of_all(seed):
    problem, too_large = random_problem(seed, n=4, linked=True), Way("keep", 1 << 40, 0.0)

    def alone(ways):
        # A problem in which these ways have to be chosen.
        pairs = zip(problem.saved, ways, strict=True)
        few = [replace(o, ways=(w,) if w.action == "keep" else (w, too_large)) for o, w in pairs]
        return Problem(few, problem.over_link)

    every = [alone(ways) for ways in itertools.product(*(one.ways for one in problem.saved))]
    every = [one for one in every if not one.too_deep]
    fewest = min(within_time(one, math.inf).peak_bytes for one in every)
    most = problem.raw_peak_bytes
    seen = 0
    for share in (0.05, 0.4, 0.8):
        limit = math.ceil(fewest + share * (most - fewest))
        plans = [solved(one, limit) for one in every]
        best = min((plan.added_s for plan in plans if plan is not None), default=None)
        found: Any = solved(problem, limit)
        if best is None:  # the greedy search alone holds so few
            assert found is None
            continue
        assert found.added_s <= 1.006 * best + 1e-6
        limit_s = found.added_s + 1e-6
        assert within_time(problem, limit_s).added_s <= limit_s * 1.0001
        seen += found.counts["zvc"] + found.counts["remat"]
        assert chosen(problem, found).keys() == set(range(len(problem.saved)))
        held = within_bytes(problem, limit)  # with what the engine may hold on the way
        if held is not None:
            assert held.peak_bytes <= limit * 1.0001
    assert seen  # or nothing was tried


def test_a_problem_takes_the_time_of_a_plain_step():
    problem = random_problem(0, linked=True)
    before: Any = problem.over_link
    shorter: Any = problem.taking(before.step_s / 2).over_link
    # The optimizer, say, hides no copies: so a share of the step is scaled, not the whole of it.
    assert shorter.durations.sum() == pytest.approx(before.durations.sum() / 2)
    assert before.durations.sum() < before.step_s
    assert problem.taking(None) is problem


def test_a_host_is_less_ahead_of_a_faster_device():
    problem = random_problem(0, linked=True)
    n = problem.n_moments
    over = replace(problem.over_link, host_ahead=np.full(n, 2e-3))  # moments of 1 ms each
    faster: Any = Problem(problem.saved, over).taking(0.75 * over.step_s).over_link
    ahead = [max(0.0, 2e-3 - 0.25e-3 * (i + 1)) for i in range(n)]
    assert faster.host_ahead == pytest.approx(ahead)
    # It gains again where it was behind: what was lost before is gone.
    late = replace(over, host_ahead=np.array([0.0] * (n - 1) + [5e-3]))
    again: Any = Problem(problem.saved, late).taking(0.75 * over.step_s).over_link
    assert again.host_ahead[-1] == pytest.approx(5e-3 - 0.25e-3)


@pytest.mark.parametrize("more", [-2, 3])
def test_a_step_may_have_more_or_fewer_moments_than_its_problem(more):
    problem = random_problem(0, linked=True)
    n = problem.n_moments
    long = over_link(n + more, 1e-3, host_ahead_s=2e-3)
    over: Any = Problem(problem.saved, long).taking(2 * long.step_s).over_link
    assert len(over.durations) == len(over.host_ahead) == n
    assert list(over.durations) == pytest.approx([2e-3] * min(n, n + more) + [0.0] * max(0, -more))
    found = within_time(Problem(problem.saved, long), 1.0)
    assert found.peak_bytes <= problem.raw_peak_bytes


def test_a_host_that_is_ahead_stays_so_after_the_last_moment_of_its_step():
    # A tensor is held for a moment after its last use, which no step has.
    held = np.zeros(MOMENTS - 1)
    held[10] = 136 * MIB
    short = over_link(MOMENTS - 1, 0.2, other_bytes=held, host_ahead_s=0.05)
    ways = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB, host_s=0.02)
    two = [replace(saved(i, 64 * MIB, 0, 18, *ways), last=19) for i in (0, 1)]
    problem = Problem([FIRST, *two], short)
    for one in (problem, problem.taking(short.step_s)):
        over: Any = one.over_link
        assert list(over.host_ahead) == pytest.approx([0.05] * MOMENTS)
        assert len(over.durations) == len(over.other_bytes) == MOMENTS
        plan: Any = solved(one, 200 * MIB)
        assert of_others(plan) == {"raw": 2}
        assert plan.added_s == pytest.approx(0.0, abs=1e-6)


def test_a_codec_that_is_worse_in_everything_is_no_choice():
    keep, best, again = Way("keep", 9, 0.0), Way("zvc", 2, 0.1, host_s=1.0), Way("remat", 0, 0.0)
    worse, like_it, less_host = Way("rle", 3, 0.1, host_s=1.0), best._replace(action="csr"), best
    less_host = Way("bitpack", 5, 0.5, host_s=0.5)
    ways = (keep, worse, best, like_it, less_host, again)
    assert list(useful(ways)) == [keep, best, less_host, again]
    # What runs again may be forbidden: no codec is worse than that.
    assert list(useful((keep, again, worse))) == [keep, again, worse]


@pytest.mark.parametrize("seed", [0, *(pytest.param(s, marks=pytest.mark.slow) for s in (1, 2))])
def test_the_plan_of_the_relaxation_is_near_that_of_the_whole_program(seed, monkeypatch):
    problem = random_problem(seed, n=40, linked=True)
    limit_s = 0.2 * sum(max(w.added_s for w in one.ways) for one in problem.saved)
    monkeypatch.setattr("cswap.fit.way_program.FEW", 0)
    found = within_time(problem, limit_s)
    monkeypatch.setattr(WayProgram, "_decided", lambda _table, shares: np.zeros(len(shares), bool))
    assert found.peak_bytes <= 1.04 * within_time(problem, limit_s).peak_bytes
    assert found.added_s <= 1.001 * limit_s


@pytest.mark.parametrize("seed", range(6))
def test_a_plans_seconds_at_other_prices_are_those_of_its_own_ways(seed):
    problem = random_problem(seed, linked=True)
    room = 0.6 * problem.raw_peak_bytes
    plan = within_bytes(problem, room)
    if plan is None:  # the greedy one, whose seconds are without hidden copies
        plan = within_time(problem, math.inf)
        plan = replace(plan, added_s=seconds_of(problem, plan) or 0.0)
    same = seconds_of(problem, plan)
    assert same is not None
    assert same == pytest.approx(plan.added_s, abs=1e-5)  # with no more memory than the plan's
    slower = problem.having(
        [
            replace(s, ways=tuple(w._replace(added_s=2 * w.added_s + 1e-3) for w in s.ways))
            for s in problem.saved
        ]
    )
    found = seconds_of(slower, plan)
    assert found is not None
    assert found >= same - 1e-6
    first, *others = problem.saved
    without = problem.having([replace(first, ways=(Way("int8", 1, 0.0),)), *others])
    assert seconds_of(without, plan) is None


@pytest.mark.parametrize("seed", range(8))
def test_moments_that_are_left_out_hold_no_more_than_others_of_their_slot(seed):
    rng = np.random.default_rng(seed)
    n = int(MOST_MOMENTS * rng.integers(1, 4) + rng.integers(0, MOST_MOMENTS))
    rows = rng.integers(0, 3, (n, 4)).astype(float)
    starts = slots(np.flatnonzero(rng.integers(0, 2, n)), n // 2, n)
    kept = undominated(rows, starts)
    slot = np.searchsorted(starts, kept, "right") - 1
    assert set(slot) == set(range(len(starts)))
    for i in range(n):
        mine = kept[slot == np.searchsorted(starts, i, "right") - 1]
        above = [j for j in mine if (rows[j] >= rows[i]).all()]
        assert above
        assert i not in mine or above == [i]


def test_a_limit_that_tensors_of_one_slot_reach_one_after_the_other():
    n = 3 * MOST_MOMENTS
    held = np.zeros(n)
    held[150] = 64 * MIB
    ways = Way("keep", 64 * MIB, 0.0), Way("raw", 0, 0.0, link_bytes=64 * MIB)
    before = saved(0, 64 * MIB, 100, 152, Way("keep", 64 * MIB, 0.0))
    after = replace(saved(1, 64 * MIB, 151, 152, Way("keep", 64 * MIB, 0.0)), last=200)
    leaves = saved(2, 64 * MIB, 0, n - 1, *ways)
    problem = Problem([before, after, leaves], over_link(n, 1.0, other_bytes=held))
    limit = 3 * 64 * MIB  # at moment 150 two of them and the others, then all three
    plan = within_bytes(problem, limit)
    assert plan is not None
    assert plan.counts == {"keep": 3}
    assert plan.added_s == pytest.approx(0.0, abs=1e-6)
    assert plan.peak_bytes == limit


def test_tensors_under_way_take_what_the_bound_lets_them():
    raw = Way("raw", 0, 0.0, link_bytes=64 * MIB)
    four = [saved(i, 64 * MIB, i, 19 - i, Way("keep", 64 * MIB, 0.0), raw) for i in range(4)]
    problem = Problem(four, over_link(MOMENTS, 0.02))
    for bound, most in ((64, 1), (128, 2), (200, 3), (512, 4)):
        held = problem.under_way(dict.fromkeys(range(4), raw), bound * MIB) / (64 * MIB)
        # Saved at 0 to 3; used at 16 to 19, and those that are used are no longer on their way.
        assert list(held[:5]) == [min(n, most) for n in (1, 2, 3, 4, 4)]
        assert list(held[16:]) == [min(n, most) for n in (3, 2, 1, 0)]


@pytest.mark.parametrize("seed", range(6))
def test_a_plan_within_a_limit_counts_what_the_engine_may_hold_on_the_way(seed):
    problem = random_problem(seed, n=8, linked=True)
    for share in (0.5, 0.7, 0.9):
        limit = share * problem.raw_peak_bytes
        plan = within_bytes(problem, limit)
        if plan is None:
            continue
        ways = {
            d.number: next(w for w in problem.saved[d.number].ways if w.action == d.action)
            for d in plan.decided.values()
        }
        held = problem.other_bytes() + problem.under_way(ways, plan.under_way_bytes)
        for i, way in ways.items():
            held += problem.bytes_of(i, way, moves=False)
        assert held.max() <= limit * (1 + TOLERANCE) + 1 or plan.under_way_bytes == 0


def test_deeper_chains_are_taken_where_they_are_faster():
    # Two tensors of three operators each: both again are six in a row, and the link is slow.
    held = np.zeros(MOMENTS)
    held[10] = 136 * MIB
    raw, again = Way("raw", 0, 0.0, link_bytes=64 * MIB), Way("remat", 0, 1e-4)
    keep = Way("keep", 64 * MIB, 0.0)
    first = saved(0, 64 * MIB, 0, 19, keep, raw, again)
    below = Need(first.names[0], 3)
    both = [
        replace(first, depth=3),
        replace(saved(1, 64 * MIB, 1, 18, keep, raw, again), needs=(below,), depth=3),
    ]
    problem = Problem([FIRST, *both], over_link(MOMENTS, 0.0005, other_bytes=held))
    assert not problem.too_deep
    plan = within_bytes(problem, 190 * MIB)  # neither can stay
    assert plan is not None
    assert of_others(plan) == {"remat": 2}
    assert plan.added_s == pytest.approx(2e-4, abs=1e-5)
    assert of_others(within_time(problem, 3e-4)) == {"remat": 2}


def test_deeper_chains_are_taken_where_an_encode_would_take_longer():
    held = np.zeros(MOMENTS)
    held[10] = 136 * MIB
    again = Way("remat", 0, 1e-4)
    below = saved(0, 64 * MIB, 0, 19, Way("keep", 64 * MIB, 0.0), again)
    need = Need(below.names[0], 3)
    ways = Way("keep", 32 * MIB, 0.0), Way("zvc", 4 * MIB, 5e-3), again
    above = (replace(saved(i, 32 * MIB, i, 19 - i, *ways), needs=(need,), depth=3) for i in (1, 2))
    over = over_link(MOMENTS, 5e-4, other_bytes=held)
    problem = Problem([FIRST, replace(below, depth=3), *above], over)
    limit = (136 + 40) * MIB  # the largest cannot stay, and one of the others can
    plan = within_bytes(problem, limit)
    assert plan is not None
    assert of_others(plan) == {"keep": 1, "remat": 2}
    assert plan.added_s == pytest.approx(2e-4, abs=1e-5)
