"""``tvdnn-heuristic``: greedy swapping until every operator fits.

tvDNN-style, our reading: of the paper (Park et al., PPoPP 2018) only the abstract was available,
which speaks of memory objects cut into sections, an optimal schedule by ILP and suboptimal ones by
heuristics. Here: at the operator that is furthest over budget, the object that is needed last goes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.policy_tools.residency import Residency
from cswap.plan.simulate import SWAP

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap raw, one object after the other, what relieves the worst operator the longest."""
    simulator = problem.simulator
    residency = Residency.of(simulator)
    action = np.zeros(len(simulator.saved), np.int8)
    while not problem.stopped():
        over = residency.over(action)
        worst = int(np.argmax(over))
        away = (action == 0) & residency.absent[:, worst]
        if over[worst] <= 0 or not away.any():
            break
        candidates = np.flatnonzero(away)
        action[candidates[np.argmax(simulator.backward[candidates])]] = SWAP
    return simulator.to_plan(action, np.zeros_like(action), policy="tvdnn-heuristic")
