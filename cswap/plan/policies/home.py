"""``home``: discrete particle swarm over keep, swap and recompute per tensor.

Source: HOME, IEEE TC 72(3), 2023, Algorithms 1-3. A particle is a vector of 0 keep, 1 swap, 2
recompute. To move, it takes for each tensor the action of the last iteration's best particle or of
its own best vector.

There are three differences from the paper. Algorithm 3 as printed evaluates both actions for every
tensor, but the reported search times fit one evaluation per particle and iteration. So here each
tensor draws one of the two actions at random. The swarm's diversity collapses without new actions,
so the share `MUTATION` of the tensors takes a random action (0 is the paper's form). The simulator
evaluates particles in place of Algorithm 2.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.policy_tools.search import Best
from cswap.plan.simulate import KEEP, RECOMPUTE, SWAP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.simulate import Simulator
    from cswap.schema.plan import Plan

PARTICLES: Final = 500
ITERATIONS: Final = 500
MUTATION: Final = 0.01

EVALUATIONS: Final = 20_000
"""The search ends after this number of evaluations, unless iterations or a deadline end it."""


def solve(problem: Problem) -> Plan:
    """The best particle of the search."""
    simulator = problem.simulator
    rng = np.random.default_rng(problem.seed)
    best = Best(simulator)
    count = int(min(PARTICLES, max(20, EVALUATIONS // 100)))
    swarm = _first(simulator, count, rng)
    own = swarm.copy()
    own_s = np.array([_judge(best, particle) for particle in swarm])
    leader = own[int(np.argmin(own_s))].copy()
    for iteration in range(ITERATIONS):
        if problem.stopped() or best.evaluations >= EVALUATIONS:
            break
        problem.report(best.evaluations / EVALUATIONS, f"iteration {iteration}")
        seconds = np.empty(count)
        for i in range(count):
            swarm[i] = _moved(own[i], leader, simulator, rng)
            seconds[i] = _judge(best, swarm[i])
            if seconds[i] < own_s[i]:
                own[i], own_s[i] = swarm[i], seconds[i]
        leader = swarm[int(np.argmin(seconds))].copy()
    assert best.action is not None
    return simulator.to_plan(best.action, np.zeros_like(best.action), policy="home")


def _first(simulator: Simulator, count: int, rng: np.random.Generator) -> NDArray[np.int8]:
    # Random particles, and three particles with one action each for all tensors.
    n = len(simulator.saved)
    swarm = rng.choice(np.array([KEEP, SWAP, RECOMPUTE], np.int8), (count, n))
    swarm[0], swarm[1], swarm[2] = KEEP, SWAP, RECOMPUTE
    swarm[:, ~simulator.recomputable] = np.minimum(swarm[:, ~simulator.recomputable], SWAP)
    return swarm


def _moved(
    own: NDArray[np.int8], leader: NDArray[np.int8], simulator: Simulator, rng: np.random.Generator
) -> NDArray[np.int8]:
    n = len(own)
    particle = np.where(rng.random(n) < 0.5, own, leader)
    strange = rng.random(n) < MUTATION
    particle[strange] = rng.integers(0, 3, int(strange.sum()))
    particle[~simulator.recomputable] = np.minimum(particle[~simulator.recomputable], SWAP)
    return particle.astype(np.int8)


def _judge(best: Best, particle: NDArray[np.int8]) -> float:
    simulator, raw = best.simulator, np.zeros(len(particle), np.int8)
    starts = simulator.earliest_prefetch(particle, raw)
    return best.consider(particle, raw, starts)
