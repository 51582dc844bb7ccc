"""Plans of a goal, against exhaustive search."""

from __future__ import annotations

import itertools
import math
import random

import pytest

from cswap.engine.recomputer import GOAL_DEPTH
from cswap.fit.problem import MOST_MOMENTS, Key, Need, Problem, Region, Saved, Way, thinned
from cswap.fit.solve import within_bytes, within_time


def random_problem(seed, n=5, in_line=True):
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
                (Key(scope, nbytes, 0),),
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
    regions = [
        Region(f"blocks.{b}", rng.random() / 30, rng.randrange(1 << 20)) for b in range(n // 2)
    ]
    return Problem(saved, regions, in_line=in_line)


def every_plan(problem):
    for count in range(len(problem.regions) + 1):
        for chosen in itertools.combinations(range(len(problem.regions)), count):
            gone = {i for r in chosen for i in problem.members[r]}
            left = [i for i in range(len(problem.saved)) if i not in gone]
            for ways in itertools.product(*(problem.saved[i].ways for i in left)):
                found = dict(zip(left, ways, strict=True))
                if can_run(problem, found, chosen):
                    yield problem.plan(found, chosen)


def can_run(problem, ways, regions):
    """Whether each tensor can be computed again that is to be, by a walk through its inputs."""
    again = {i for i, way in ways.items() if way.action == "remat"}
    numbers = {name: i for i, s in enumerate(problem.saved) for name in s.names}

    def depth(i):
        one = problem.saved[i]
        below = [n.depth + depth(numbers[n.name]) for n in one.needs if numbers[n.name] in again]
        return max([one.depth, *below])

    gone = {i for r in regions for i in problem.members[r]}
    needed = {numbers[n.name] for i in again for n in problem.saved[i].needs}
    return not needed & gone and all(depth(i) <= GOAL_DEPTH for i in again)


def chosen(problem, plan):
    """A plan's ways, by number of the tensor, and its regions."""
    ways = {
        d.number: next(w for w in problem.saved[d.number].ways if w.action == d.action)
        for d in plan.decided.values()
    }
    return ways, [n for n, region in enumerate(problem.regions) if region.path in plan.regions]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("in_line", [True, False])
def test_the_solver_finds_the_best_plan_of_all(seed, in_line):
    pytest.importorskip("scipy")
    problem = random_problem(seed, in_line=in_line)
    plans = list(every_plan(problem))
    fewest = min(plan.peak_bytes for plan in plans)
    assert within_time(problem, math.inf).peak_bytes <= 1.005 * fewest
    for share in (0.0, 0.3, 0.7):
        most = problem.plan({i: s.ways[0] for i, s in enumerate(problem.saved)}, ()).peak_bytes
        limit = math.ceil(fewest + share * (most - fewest))
        best_s = min(plan.added_s for plan in plans if plan.peak_bytes <= limit)
        found = within_bytes(problem, limit)
        assert found is not None
        assert can_run(problem, *chosen(problem, found))
        assert found.peak_bytes <= limit * 1.0001
        assert found.added_s <= 1.006 * best_s + 1e-7
    limit_s = sorted(plan.added_s for plan in plans)[len(plans) // 3]
    fewest = min(plan.peak_bytes for plan in plans if plan.added_s <= limit_s)
    found = within_time(problem, limit_s)
    assert found.added_s <= limit_s * 1.0001
    assert found.peak_bytes <= 1.006 * fewest


@pytest.mark.parametrize("seed", range(6))
def test_without_the_solver_plans_are_within_their_limits(seed):
    problem = random_problem(seed, n=7)
    kept = problem.plan({i: s.ways[0] for i, s in enumerate(problem.saved)}, ())
    fewest = within_time(problem, math.inf, exact=False)
    assert fewest.peak_bytes < kept.peak_bytes
    limit = (kept.peak_bytes + fewest.peak_bytes) / 2
    found = within_bytes(problem, limit, exact=False)
    assert found is not None
    assert found.peak_bytes <= limit
    assert can_run(problem, *chosen(problem, found))
    assert can_run(problem, *chosen(problem, fewest))
    assert within_bytes(problem, kept.peak_bytes, exact=False) == kept
    assert within_time(problem, 0.0, exact=False) == kept


def test_without_scipy_the_search_is_greedy(monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "scipy.optimize", None)
    problem = random_problem(0)
    assert within_time(problem, math.inf) == within_time(problem, math.inf, exact=False)


def test_no_plan_where_nothing_fits():
    problem = random_problem(1)
    smallest = within_time(problem, math.inf)
    assert within_bytes(problem, smallest.peak_bytes * 0.98) is None


def test_a_recomputed_region_holds_its_input_and_then_all_that_it_saves():
    ways = (Way("keep", 100, 0.0),)
    saved = [
        Saved((Key("a.x", 100, 0),), 100, ways, 0, 5, 5),
        Saved((Key("a.y", 100, 0),), 100, ways, 1, 4, 4),
        Saved((Key("b", 100, 0),), 100, ways, 2, 3, 3),
    ]
    problem = Problem(saved, [Region("a", 1.0, 10)], in_line=True)
    assert list(problem.bytes_of_region(0)) == [10, 10, 10, 10, 210, 110]
    plan = problem.plan({2: ways[0]}, [0])
    assert (plan.peak_bytes, plan.regions, plan.added_s) == (210, frozenset({"a"}), 1.0)


def test_an_encoded_tensor_takes_both_forms_while_it_is_used():
    way = Way("zvc", 10, 1.0)
    one = Saved((Key("a", 100, 0),), 100, (Way("keep", 100, 0.0), way), 0, 7, 8)
    inline, beside = (Problem([one], [], in_line=line) for line in (True, False))
    assert list(inline.bytes_of(0, way)) == [100, *[10] * 6, 110, 110]
    assert list(beside.bytes_of(0, way)) == [100] * 3 + [10, 10] + [110] * 4


def test_long_steps_are_shortened_to_their_fullest_moments():
    import numpy as np

    rows = np.random.default_rng(0).random((3, 5 * MOST_MOMENTS + 7))
    few = thinned(rows)
    assert few.shape == (3, MOST_MOMENTS)
    assert np.array_equal(few.max(axis=1), rows.max(axis=1))


def with_needs():
    keep = Way("keep", 100, 0.0)
    saved = [
        Saved((Key("a.x", 100, 0),), 100, (keep,), 0, 5, 5),
        Saved((Key("a.y", 100, 0),), 100, (keep,), 1, 4, 4),
        Saved(
            (Key("b", 100, 0),),
            100,
            (keep, Way("remat", 0, 0.1)),
            2,
            3,
            3,
            (Need(Key("a.y", 100, 0), 1),),
        ),
    ]
    return Problem(saved, [Region("a", 1.0, 10)], in_line=True)


@pytest.mark.parametrize("exact", [True, False])
def test_nothing_is_computed_again_from_what_a_recomputed_region_saves(exact):
    problem = with_needs()
    assert problem.prevented == (frozenset({2}),)
    for limit_s in (0.1, 1.0, 2.0):
        found = within_time(problem, limit_s, exact=exact)
        again = [d.action for d in found.decided.values() if d.action == "remat"]
        assert not (again and found.regions)


def test_what_a_region_shares_with_its_surroundings_stays_and_is_read_early():
    ways = (Way("keep", 100, 0.0), Way("zvc", 10, 0.1))
    shared = Saved((Key("o", 100, 0), Key("a.x", 100, 0)), 100, ways, 0, 5, 5)
    inside = Saved((Key("a.y", 100, 0),), 100, ways, 1, 4, 4)
    problem = Problem([shared, inside], [Region("a", 1.0, 0)], in_line=True)
    assert problem.members == ((1,),)
    assert list(problem.bytes_of_region(0)) == [0, 0, 0, 0, 200, 0]
    plan = problem.plan({0: ways[1]}, [0])
    assert {name.scope: d.action for name, d in plan.decided.items()} == {"o": "zvc", "a.x": "zvc"}
    assert plan.raw_bytes == 100


def test_memory_that_forward_holds_on_to_counts():
    way = Way("zvc", 10, 1.0)
    one = Saved((Key("a", 100, 0),), 100, (Way("keep", 100, 0.0), way), 0, 5, 5, left=2)
    problem = Problem([one], [], in_line=True)
    assert list(problem.bytes_of(0, way)) == [100, 110, 110, 10, 10, 110]
