"""Inputs of chains, which come back before their own use: their bytes in a plan, and in a step."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import numpy as np
import pytest
import torch

from cswap.devices.cpu import CpuDevice
from cswap.fit import controller
from cswap.fit.greedy import Search
from cswap.fit.lent import SMALL
from cswap.fit.problem import Problem
from cswap.fit.saved import Key, Need, Saved, Way
from cswap.fit.solve import Found
from cswap.fit.way_program import WayProgram
from tests.fit.test_families import FAMILIES
from tests.fit.test_smallest_goal import Run
from tests.fit.test_solve import over_link

MIB = 1 << 20


@pytest.mark.parametrize("family", [name for name in FAMILIES if name != "experts"])
def test_a_plan_of_chains_takes_as_much_as_predicted(family, install, monkeypatch):
    """Each tensor has its smallest way, so many are computed again from others that are."""

    def found_for(problem, *_):
        state = Search(problem)
        state.take_smallest()
        return Found(state.plan())

    monkeypatch.setattr(controller, "found_for", found_for)
    run = Run(family, 0, FAMILIES)
    handle = install(run, fit="1GiB")
    run.train_steps(6)
    goal = handle.goal
    assert goal.phase == "obeying"
    assert goal.actions["remat"] > 4
    assert goal.measured_bytes == pytest.approx(goal.predicted_bytes, rel=0.01)


def random_steps(seed, n=9):
    """Tensors that can be computed again from others, mostly used in the order of backward."""
    rng, saved = random.Random(seed), list[Saved]()
    uses = [*reversed(range(n, 2 * n))]
    a, b = rng.sample(range(n), 2)
    uses[a], uses[b] = uses[b], uses[a]
    sizes = MIB // 256, MIB, 2 * MIB, 5 * MIB
    for i in range(n):
        nbytes = rng.choice(sizes)
        ways = (Way("keep", nbytes, 0.0), Way("zvc", nbytes // 2, 0.0), Way("remat", 0, 0.0))
        needs = [one for one in saved if rng.random() < 0.4]
        saved.append(
            Saved(
                (Key("", torch.float32, i),), nbytes, ways, i, uses[i], uses[i],
                tuple(Need(one.names[0], 0) for one in needs), depth=0,
            )
        )  # fmt: skip
    return Problem(saved), rng


def lent_bytes(problem, ways):
    """Bytes at each moment of `Problem.lent_bytes`, by a backward in which inputs are brought."""
    saved, there = problem.saved, np.zeros((len(ways), problem.n_moments), bool)
    least = SMALL * max(one.nbytes for one in saved)

    def bring(i, moment):
        for need in saved[i].needs:
            j = need.name.nth
            one = saved[j]
            is_there = ways[j].action == "keep" or one.first_use <= moment or there[j, moment]
            if is_there or one.nbytes < least:
                continue
            there[j, moment : one.first_use] = True
            if ways[j].action == "remat":
                bring(j, moment)

    for i in sorted(ways, key=lambda i: saved[i].first_use):
        if ways[i].action == "remat":
            bring(i, saved[i].first_use)
    return there.T @ np.array([float(one.nbytes) for one in saved])


def test_inputs_are_there_from_the_first_use_of_a_chain_to_their_own():
    moments = set()
    for seed in range(250):
        problem, rng = random_steps(seed)
        for _ in range(5):
            ways = {i: rng.choice(one.ways) for i, one in enumerate(problem.saved)}
            expected = lent_bytes(problem, ways)
            assert problem.lent_bytes(ways).tolist() == expected.tolist()
            held = sum(problem.bytes_of(i, way) for i, way in ways.items())
            assert problem.plan(ways).peak_bytes == (held + expected).max()
            moments.add(int(np.count_nonzero(expected)))
    assert moments >= set(range(8))


def test_the_solver_counts_the_same_bytes_as_a_plan():
    pytest.importorskip("scipy")
    for seed in range(60):
        problem, rng = random_steps(seed)
        program = WayProgram(problem, every_way=True)
        arrays = program._arrays(math.inf, math.inf)
        for _ in range(4):
            chosen = [rng.choice(one.ways) for one in problem.saved]
            taken = np.array([chosen[v.index] is v.way for v in program._variables])
            x = arrays.best(fixed=np.ones(len(taken), np.bool_), at=taken, whole=False)
            assert x is not None
            expected = problem.plan(dict(enumerate(chosen))).peak_bytes
            assert x[len(taken)] * MIB == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("seed", range(10))
def test_the_greedy_search_knows_what_it_holds(seed):
    problem, rng = random_steps(seed)
    state = Search(problem)
    for _ in range(20):
        moment = rng.randrange(problem.n_moments)
        changes = list(state.changes(moment))
        if changes:
            state.take(rng.choice(changes))
        assert state.total.max() == state.plan().peak_bytes


def test_on_a_cpu_a_large_input_is_held_for_the_computation_alone():
    """Of three tensors, each is computed from the one before; the second is too large to wait."""
    again, large = Way("remat", 0, 0.0), CpuDevice.ready_bytes + MIB
    saved = [
        Saved(
            (Key("", torch.float32, i),), nbytes, (Way("keep", nbytes, 0.0), again), i, 8 - 2 * i,
            8 - 2 * i, (Need(Key("", torch.float32, i - 1), 1),) if i else (),
        )
        for i, nbytes in enumerate((MIB, large, MIB))
    ]  # fmt: skip
    lent = Problem(saved).lent_bytes(dict.fromkeys(range(3), again))
    assert lent.tolist() == [0, 0, 0, 0, large, 0, MIB, MIB, 0]
    lent = Problem(saved, over_link(9)).lent_bytes(dict.fromkeys(range(3), again))
    assert lent.tolist() == [0, 0, 0, 0, *[large + MIB] * 2, MIB, MIB, 0]


def test_no_input_that_stays_is_brought_back():
    problem, _ = random_steps(0)
    ways = {i: one.ways[2 * (i % 2)] for i, one in enumerate(problem.saved)}
    others = [replace(one, needs=()) for one in problem.saved]
    again = {i for i, way in ways.items() if way.action == "remat"}
    assert Problem(others).lent == ()
    for one in problem.lent:
        assert one.askers
        assert all(problem.saved[asker.number].recomputable for asker in one.askers)
    kept = {i: way if i not in again else problem.saved[i].ways[0] for i, way in ways.items()}
    assert not problem.lent_bytes(kept).any()
