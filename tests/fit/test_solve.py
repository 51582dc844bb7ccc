"""Plans of a goal, against exhaustive search."""

from __future__ import annotations

import ctypes
import itertools
import math
import random
import sys
import threading
from dataclasses import replace
from importlib.metadata import version
from importlib.util import find_spec

import numpy as np
import pytest
import torch

from cswap.engine.recomputer import GOAL_DEPTH, LINK_DEPTH
from cswap.fit.link_rates import LinkRates
from cswap.fit.problem import OverLink, Problem
from cswap.fit.saved import Key, Need, Saved, Way
from cswap.fit.solve import NEAR, smallest, within_bytes, within_time
from cswap.fit.way_program import GAP, OFF_PEAK, SEARCH, WayProgram, worth

LINK = LinkRates(1e9, 2e9, 0.8e9)


def over_link(n_moments, seconds=1e-3, *, host_ahead_s=1.0, other_bytes=None):
    """A link beside moments that each take so long; the host is ahead by so much at all of them."""
    return OverLink(
        LINK,
        np.full(n_moments, seconds),
        1.5 * seconds * n_moments + 1e-9,
        np.full(n_moments, host_ahead_s),
        np.zeros(n_moments) if other_bytes is None else other_bytes,
    )


def random_problem(seed, n=5, *, linked=False):
    rng = random.Random(seed)
    saved: list[Saved] = []
    for i in range(n):
        nbytes = rng.randrange(1, 9) << 20
        ways = [Way("keep", nbytes, 0.0)]
        ways += [Way("zvc", int(nbytes * rng.random()), rng.random() / 100)]
        ways += [Way("remat", 0, rng.random() / 50)] * (rng.random() < (0.9 if seed % 2 else 0.5))
        use = 2 * n - 1 - i
        scope = f"blocks.{i // 2}.{'ab'[i % 2]}"
        saved.append(
            Saved(
                (Key(scope, torch.float32, 0),),
                nbytes,
                tuple(ways),
                i,
                use,
                use + rng.randrange(2),
                needs := tuple(
                    Need(other.names[0], rng.randrange(1, 4))
                    for other in saved[-2:]
                    if len(ways) == 3 and rng.random() < 0.7
                ),
                depth=max((need.depth for need in needs), default=1),
            )
        )
    if not linked:
        return Problem(saved)
    link = over_link(
        1 + max(one.last for one in saved),
        host_ahead_s=rng.choice((0.0, 0.02)),
        other_bytes=np.array([rng.randrange(9) << 20 for _ in range(2 * n + 1)], float),
    )
    return Problem([replace(one, ways=tuple(map(moved, one.ways))) for one in saved], link)


def moved(way):
    """The way of a device with a link: an encoding takes none of its memory."""
    if way.action != "zvc":
        return way
    return Way("zvc", 0, way.added_s / 10, link_bytes=way.held_bytes, host_s=1e-4)


def every_plan(problem):
    for ways in itertools.product(*(saved.ways for saved in problem.saved)):
        found = dict(enumerate(ways))
        if can_run(problem, found):
            yield problem.plan(found)


def can_run(problem, ways):
    """Whether each tensor can be computed again that is to be, by a walk through its inputs."""
    again = {i for i, way in ways.items() if way.action == "remat"}
    numbers = {name: i for i, s in enumerate(problem.saved) for name in s.names}

    def depth(i):
        one = problem.saved[i]
        below = [n.depth + depth(numbers[n.name]) for n in one.needs if numbers[n.name] in again]
        return max([one.depth, *below])

    most = GOAL_DEPTH if problem.over_link is None else LINK_DEPTH
    return all(depth(i) <= most for i in again)


def chosen(problem, plan):
    """A plan's ways, by number of the tensor."""
    return {
        d.number: next(w for w in problem.saved[d.number].ways if w.action == d.action)
        for d in plan.decided.values()
    }


@pytest.mark.parametrize("seed", range(12))
def test_the_solver_finds_the_best_plan_of_all(seed):
    pytest.importorskip("scipy")
    problem = random_problem(seed)
    plans = list(every_plan(problem))
    fewest = min(plan.peak_bytes for plan in plans)
    assert within_time(problem, math.inf).peak_bytes <= 1.005 * fewest
    for share in (0.0, 0.3, 0.7):
        most = problem.plan({i: s.ways[0] for i, s in enumerate(problem.saved)}).peak_bytes
        limit = math.ceil(fewest + share * (most - fewest))
        best_s = min(plan.added_s for plan in plans if plan.peak_bytes <= limit)
        found = within_bytes(problem, limit)
        assert found is not None
        assert can_run(problem, chosen(problem, found))
        assert found.peak_bytes <= limit * 1.0001
        assert found.added_s <= 1.006 * best_s + 1e-7
    limit_s = sorted(plan.added_s for plan in plans)[len(plans) // 3]
    found = within_time(problem, limit_s)
    assert found.added_s <= limit_s * 1.0001
    fewest = min(worth(problem, plan) for plan in plans if plan.added_s <= limit_s)
    assert worth(problem, found) <= 1.006 * fewest


def test_the_worth_of_a_plan_is_its_peak_and_a_part_of_the_bytes_at_all_moments():
    problem = random_problem(0)
    plan = within_time(problem, math.inf)
    ways = chosen(problem, plan)
    held = sum(problem.bytes_of(i, way) for i, way in ways.items()) + problem.lent_bytes(ways)
    assert worth(problem, plan) == pytest.approx(held.max() + OFF_PEAK * held.mean())


def test_time_that_is_left_takes_bytes_off_other_moments():
    """A tensor that is there at the peak alone cannot leave; two others come and go before it."""

    def one(n, nbytes, born, use, *others):
        ways = (Way("keep", nbytes, 0.0), *others)
        return Saved((Key("", torch.float32, n),), nbytes, ways, born, use, use)

    code = Way("zvc", 1 << 20, 1e-3)
    early = [one(n, 8 << 20, 0, 20, code) for n in range(2)]
    problem = Problem([*early, one(2, 64 << 20, 20, 21)])
    fast, slow = (within_time(problem, limit_s) for limit_s in (0.0, 1.5e-3))
    assert fast.counts == {"keep": 3}
    assert slow.counts == {"keep": 2, "zvc": 1}
    assert slow.peak_bytes >= fast.peak_bytes


@pytest.mark.parametrize("linked", [False, True])
def test_the_better_plan_of_two_searches_is_taken_and_says_what_both_have_found(
    linked, monkeypatch
):
    pytest.importorskip("scipy")
    problem = random_problem(2, n=12, linked=linked)
    limit, limit_s = 0.75 * problem.raw_peak_bytes, 0.04
    found, within = within_bytes(problem, limit), within_time(problem, limit_s)
    assert found is not None
    for plan in (found, within):
        assert plan.searches["solver"] == (plan.peak_bytes, plan.added_s)
        assert plan.searches["greedy"] != plan.searches["solver"]
    smallest_of_all = within_time(problem, math.inf)

    def poor(self, *, limit_bytes, limit_s, like=None):
        return smallest_of_all if like is None else solve(self, limit_bytes, limit_s, like)

    def solve(self, limit_bytes, limit_s, like):
        return original(self, limit_bytes=limit_bytes, limit_s=limit_s, like=like)

    original = WayProgram.solve
    monkeypatch.setattr(WayProgram, "solve", poor)
    other = within_bytes(problem, limit)
    assert other is not None
    assert other.searches["greedy"] == (other.peak_bytes, other.added_s) == found.searches["greedy"]
    assert other.searches["solver"] == (smallest_of_all.peak_bytes, smallest_of_all.added_s)


@pytest.fixture
def greedily(monkeypatch):
    """HiGHS finds nothing."""
    monkeypatch.setattr(WayProgram, "solve", lambda *_, **__: None)


@pytest.mark.usefixtures("greedily")
@pytest.mark.parametrize("seed", range(6))
def test_without_the_solver_plans_are_within_their_limits(seed):
    problem = random_problem(seed, n=7)
    kept = problem.plan({i: s.ways[0] for i, s in enumerate(problem.saved)})
    fewest = within_time(problem, math.inf)
    assert fewest.peak_bytes < kept.peak_bytes
    limit = (kept.peak_bytes + fewest.peak_bytes) / 2
    found = within_bytes(problem, limit)
    assert found is not None
    assert found.peak_bytes <= limit
    assert can_run(problem, chosen(problem, found))
    assert can_run(problem, chosen(problem, fewest))
    assert within_bytes(problem, kept.peak_bytes) == kept
    assert within_time(problem, 0.0) == kept


CODECS = ("zvc", (0.05, 0.6), (0.9, 1.1)), ("rle", (0.3, 0.9), (0.3, 0.6))
"""Shares of the bytes that are held, and nanoseconds per byte."""


def long_search():
    """A problem whose search goes on for 137 nodes, if it has to find the very best."""
    rng, saved = random.Random(1), []
    for i in range(80):
        nbytes, born = rng.randrange(1 << 20, 8 << 20), rng.randrange(158)
        use = rng.randrange(born + 1, 160)
        ways = [Way("keep", nbytes, 0.0)]
        for action, held, rate in CODECS:
            held_bytes = int(nbytes * rng.uniform(*held))
            ways.append(Way(action, held_bytes, 1e-9 * nbytes * rng.uniform(*rate)))
        saved.append(Saved((Key(f"m{i}", torch.float32, 0),), nbytes, tuple(ways), born, use, use))
    return Problem(saved)


def test_a_busy_machine_makes_the_same_plan(monkeypatch):
    optimize = pytest.importorskip("scipy.optimize")
    monkeypatch.setitem(SEARCH, "mip_rel_gap", 0.0)
    monkeypatch.setitem(SEARCH, "node_limit", SEARCH["node_limit"] // 10)
    solve, problem, nodes = optimize.milp, long_search(), []

    def counted(*args, **options):
        found = solve(*args, **options)
        nodes.append(found.mip_node_count)
        return found

    monkeypatch.setattr(optimize, "milp", counted)
    program = WayProgram(problem)
    limit_s = 0.3 * sum(max(way.added_s for way in one.ways) for one in problem.saved)

    def made():
        return program.solve(limit_bytes=math.inf, limit_s=limit_s)

    alone, done = made(), threading.Event()
    busy = threading.Thread(target=lambda: [*iter(done.is_set, True)])
    busy.start()
    beside = made()
    done.set()
    busy.join()
    assert alone is not None
    assert beside == alone
    assert nodes == [10, 10]  # it would take 137 to end by itself


@pytest.mark.xfail(
    version("scipy").startswith("1.17.") if find_spec("scipy") else False,
    reason="HiGHS 1.12 prints a line whatever its options say; see docs/limits.md",
    strict=False,  # the line may depend on the processor
)
@pytest.mark.skipif(sys.platform != "linux", reason="flushes C's buffers by glibc")
def test_the_solver_prints_nothing(capfd):
    problem = random_problem(100015, n=100)
    most = problem.plan({i: s.ways[0] for i, s in enumerate(problem.saved)}).peak_bytes
    found = within_bytes(problem, 0.5875806061435594 * most)
    ctypes.CDLL(None).fflush(None)
    assert found is not None
    assert capfd.readouterr() == ("", "")


def test_no_plan_where_nothing_fits():
    problem = random_problem(1)
    smallest = within_time(problem, math.inf)
    assert within_bytes(problem, smallest.peak_bytes * 0.98) is None


def test_an_encoded_tensor_takes_both_forms_while_it_is_used():
    way = Way("zvc", 10, 1.0)
    one = Saved((Key("a", torch.float32, 0),), 100, (Way("keep", 100, 0.0), way), 0, 7, 8)
    inline, beside = Problem([one]), Problem([one], over_link(9))
    assert list(inline.bytes_of(0, way)) == [100, *[10] * 6, 110, 110]
    assert list(beside.bytes_of(0, way)) == [100] * 3 + [10, 10] + [110] * 4
    assert list(beside.bytes_of(0, way, moves=False)) == [100, *[10] * 6, 110, 110]


def test_memory_that_forward_holds_on_to_counts():
    way = Way("zvc", 10, 1.0)
    one = Saved((Key("a", torch.float32, 0),), 100, (Way("keep", 100, 0.0), way), 0, 5, 5, left=2)
    problem = Problem([one])
    assert list(problem.bytes_of(0, way)) == [100, 110, 110, 10, 10, 110]


@pytest.mark.timeout(60)
@pytest.mark.usefixtures("greedily")
@pytest.mark.parametrize("n", [2, 3, 4])
def test_the_greedy_search_ends_where_changes_lead_back_to_equal_peaks(n):
    for seed in range(300):
        rng, saved = random.Random(seed), []
        for i in range(n):
            nbytes = rng.choice((4, 8))
            ways = [Way("keep", nbytes, 0.0), Way("zvc", rng.choice((2, 4)), rng.random())]
            ways += [Way("remat", 0, rng.random())] * (rng.random() < 0.7)
            use = 2 * n - 1 - i
            left = min(i + rng.randrange(3), use - 1)
            last = use + rng.randrange(3)
            name = Key("", torch.float32, i)
            saved.append(Saved((name,), nbytes, tuple(ways), i, use, last, left=left))
        problem = Problem(saved)
        kept = problem.plan({i: one.ways[0] for i, one in enumerate(saved)})
        assert within_time(problem, math.inf).peak_bytes <= kept.peak_bytes


@pytest.mark.parametrize("seed", range(12))
def test_the_smallest_plans_can_be_kept_and_the_first_is_nearly_the_smallest(seed):
    problem = random_problem(seed)
    plans = smallest(problem)
    least = min(plan.peak_bytes for plan in every_plan(problem))
    near = [plan for plan in plans if plan.peak_bytes <= NEAR * least * (1 + GAP) + 1]
    assert plans[0] is min(near, key=lambda plan: plan.added_s)
    far = [plan.peak_bytes for plan in plans if plan not in near]
    assert far == sorted(far)
    assert min(plan.peak_bytes for plan in plans) <= least * (1 + GAP) + 1
    for plan in plans:
        assert can_run(problem, {d.number: way_of(problem, d) for d in plan.decided.values()})
    assert (
        any(
            all(
                way_of(problem, d).held_bytes
                == min(w.held_bytes for w in problem.saved[d.number].ways)
                for d in plan.decided.values()
            )
            for plan in plans
        )
        or problem.too_deep
    )


def way_of(problem, decided):
    return next(w for w in problem.saved[decided.number].ways if w.action == decided.action)


def test_parts_of_a_storage_stay_all_or_leave_all():
    def one(n, part_of, added_s):
        ways = (Way("keep", 8 << 20, 0.0), Way("zvc", 1 << 20, added_s))
        return Saved((Key("", torch.float32, n),), 8 << 20, ways, n, 20, 20, part_of=part_of)

    # The turn is full: there is one more tensor that cannot leave.
    last = Saved((Key("", torch.float32, 4),), 64 << 20, (Way("keep", 64 << 20, 0.0),), 9, 10, 10)
    for limit_s, leave in ((1.5e-3, {3}), (2.5e-3, {1, 2}), (3.5e-3, {1, 2, 3})):
        saved = [one(1, 7, 1e-3), one(2, 7, 1e-3), one(3, 0, 1.2e-3), last]
        found = within_time(Problem(saved), limit_s)
        assert {k.nth for k, d in found.decided.items() if d.action != "keep"} == leave
