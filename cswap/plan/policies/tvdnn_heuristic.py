"""``tvdnn-heuristic``: greedy swapping until every operator fits.

This is our reading of tvDNN (Park et al., PPoPP 2018), of which only the abstract was available. It
mentions memory objects cut into sections, an optimal schedule by ILP, and suboptimal schedules by
heuristics. The heuristic here: find the operator that is furthest over the budget, and swap the
object that is needed last.
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
    """Swap raw, one tensor after the other: at the worst operator, the one needed last."""
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
