"""Large programs, in which like tensors of several blocks have one variable."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
import torch

from cswap.fit import way_program
from cswap.fit.alike import TURNS, alike
from cswap.fit.problem import Problem
from cswap.fit.saved import Key, Need, Saved, Way
from cswap.fit.solve import within_bytes, within_time
from cswap.fit.way_program import WayProgram
from tests.fit.test_solve import can_run, chosen, moved, over_link

pytest.importorskip("scipy")

MIB = 1 << 20


def blocks(n, *, linked=False, seed=0):
    """A step of so many blocks: each saves its argument, a wide tensor and a mask."""
    rng, saved = random.Random(seed), list[Saved]()
    last = 6 * n - 1
    for b in range(n):
        argument, wide = Key(f"h.{b}.norm", torch.float32, 0), Key(f"h.{b}.mlp", torch.float32, 0)
        below = [Need(Key(f"h.{b - 1}.norm", torch.float32, 0), 2)] if b else []
        like = [
            (argument, 8, Way("remat", 0, 9e-4), below),
            (wide, 32, Way("remat", 0, 4e-3), [Need(argument, 1)]),
            (Key(f"h.{b}.mlp", torch.bool, 0), 4, Way("rle", MIB, 3e-4), []),
        ]
        for name, mib, way, needs in like:
            if way.action == "remat" and not needs:
                ways = [Way("keep", mib * MIB, 0.0)]
            else:
                seconds = way.added_s * rng.uniform(0.9, 1.1)
                ways = [Way("keep", mib * MIB, 0.0), way._replace(added_s=seconds)]
            ways.append(Way("zvc", mib * MIB * 3 // 4, 1e-3 * mib))
            i = len(saved)
            depth = max((need.depth for need in needs), default=1)
            one = Saved((name,), mib * MIB, tuple(ways), i, last - i, last - i)
            saved.append(replace(one, needs=tuple(needs), depth=depth))
    if not linked:
        return Problem(saved)
    some = [replace(one, ways=tuple(map(moved, one.ways))) for one in saved]
    return Problem(some, over_link(6 * n, 2e-3))


def named(*scopes, nbytes=1, actions=("keep",)):
    return [
        (Saved((Key(s, torch.float32, 0),), nbytes, (Way("keep", nbytes, 0.0),), 0, 1, 1), actions)
        for s in scopes
    ]


def test_blocks_are_taken_by_turns_and_only_like_tensors_together():
    eight = [f"h.{b}" for b in range(8)]
    assert alike(named(*eight), 1) == list(range(8))
    assert alike(named(*eight), 2) == [0, 1, 0, 1, 2, 3, 2, 3]
    assert alike(named(*eight[:5]), 4) == [0, 1, 0, 1, 0]
    assert alike(named("h.0.a", "h.0.b", "h.2.a", "h.2.b"), 9) == [0, 1, 2, 3]
    others = [
        *named("h.0", "h.1"),
        *named("h.2", nbytes=2),
        *named("h.3", actions=("keep", "zvc")),
        *named("h.4"),
    ]
    assert alike(others, 9) == [0, 1, 2, 3, 0]
    parts = [(replace(one, part_of=7 + n), ways) for n, (one, ways) in enumerate(named(*eight))]
    assert alike(parts, 9) == list(range(8))


@pytest.mark.parametrize("linked", [False, True])
@pytest.mark.parametrize("seed", range(1, 2))
def test_a_large_program_is_a_small_one_and_its_plans_are_nearly_as_good(linked, seed, monkeypatch):
    problem = blocks(12, linked=linked, seed=seed)
    n = len(WayProgram(problem)._variables)
    limit, limit_s = 0.6 * problem.raw_peak_bytes, 0.03

    def found():
        by_bytes, by_time = within_bytes(problem, limit), within_time(problem, limit_s)
        assert by_bytes is not None
        for plan in (by_bytes, by_time):
            assert can_run(problem, chosen(problem, plan))
        assert by_bytes.peak_bytes <= limit * 1.0001
        assert by_time.added_s <= limit_s * 1.0001
        return by_bytes, by_time

    monkeypatch.setattr("cswap.fit.solve.MOST_GREEDY", 0)
    whole = found()
    monkeypatch.setattr(way_program, "MOST_WAYS", n / 3)
    program = WayProgram(problem)
    assert program._n_ways < n / 2.5
    members = [i for i, group in enumerate(program._groups) if group == program._groups[4]]
    assert members == [4 + 3 * TURNS * k for k in range(3)]  # of blocks 1, 3 and 5
    like = found()
    for plan in like:
        actions = {d.number: d.action for d in plan.decided.values()}
        assert len({actions[i] for i in members}) == 1
    assert like[0].added_s <= 1.2 * whole[0].added_s
    assert like[1].peak_bytes <= 1.2 * whole[1].peak_bytes


@pytest.mark.parametrize("linked", [False, True])
def test_a_program_of_like_blocks_counts_the_bytes_and_the_seconds_of_each(linked, monkeypatch):
    """Its solution costs as much as the plan that is made of it."""
    problem = blocks(12, linked=linked)
    monkeypatch.setattr(way_program, "MOST_WAYS", len(WayProgram(problem)._variables) / 2)
    program = WayProgram(problem)
    limit = 0.5 * problem.raw_peak_bytes
    arrays = program._arrays(limit, math.inf)
    x = arrays.best()
    assert x is not None
    plan = program._plan(x)
    assert 1e-3 * (arrays.cost @ x) == pytest.approx(plan.added_s, rel=1e-6)
    if not linked:
        assert plan.peak_bytes <= limit * 1.0001
        assert plan.added_s == pytest.approx(problem.added_s(plan))
    each = WayProgram(problem, every_way=True)._columns().sum(axis=1)
    monkeypatch.setattr(way_program, "useful", list)
    assert WayProgram(problem)._columns().sum(axis=1) == pytest.approx(each)
