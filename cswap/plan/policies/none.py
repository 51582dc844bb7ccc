"""``none``: keeps every tensor. The planner checks whether the step fits the budget."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulate import KEEP

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Keep every tensor."""
    simulator = problem.simulator
    keep = np.full(len(simulator.saved), KEEP, np.int8)
    return simulator.to_plan(keep, np.zeros_like(keep), policy="none")
