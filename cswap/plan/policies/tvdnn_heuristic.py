"""``tvdnn-heuristic``: greedy swapping until every operator fits.

This is our reading of tvDNN (Park et al., PPoPP 2018), of which only the abstract was available. It
mentions memory objects cut into sections, an optimal schedule by ILP, and suboptimal schedules by
heuristics. The heuristic here: find the operator that is furthest over the budget, and swap the
object that is needed last.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulate import SWAP
from cswap.plan.simulator.lifetimes import live_bytes

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap raw, one tensor after the other: at the worst operator, the one needed last."""
    simulator = problem.simulator
    operators = np.arange(len(simulator.trace.operators))
    # A tensor leaves during the operator after its last forward use, and comes back during the one
    # before its first backward use: it is not away during these two.
    away = (operators > simulator.forward[:, None] + 1) & (
        operators < simulator.backward[:, None] - 1
    )
    held = np.array(live_bytes(simulator.trace), np.int64)
    action = np.zeros(len(simulator.saved), np.int8)
    while not problem.stopped():
        worst = int(np.argmax(held))
        candidates = np.flatnonzero((action == 0) & away[:, worst])
        if held[worst] <= simulator.budget_bytes or not candidates.size:
            break
        last = candidates[np.argmax(simulator.backward[candidates])]
        action[last] = SWAP
        held -= simulator.nbytes[last] * away[last]
    return simulator.to_plan(action, np.zeros_like(action), policy="tvdnn-heuristic")
