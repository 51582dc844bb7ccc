"""``tvdnn-ilp``: the least bytes over the link with which every operator fits, by ILP.

tvDNN-style, our reading (see `tvdnn_heuristic`): minimise the sum of ``nbytes * x``, x in {0, 1}
per object, such that at every operator the live bytes minus those of swapped objects that are away
stay within the budget (`cswap.plan.residency`). Solved by HiGHS.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.residency import Residency

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap raw what the ILP says; everything if it finds nothing."""
    simulator = problem.simulator
    limit_s = None
    if problem.deadline is not None:
        limit_s = max(0.1, problem.deadline - time.monotonic())
    chosen = least_bytes(Residency.of(simulator), limit_s)
    action = np.ones(len(simulator.saved), np.int8) if chosen is None else chosen
    return simulator.to_plan(action, np.zeros_like(action), policy="tvdnn-ilp")


def least_bytes(residency: Residency, limit_s: float | None = None) -> NDArray[np.int8] | None:
    """[n] 1 where swapped; None if no choice fits, or none was found in time."""
    from scipy.optimize import Bounds, LinearConstraint, milp

    needed = residency.live - residency.budget_bytes
    tight = needed > 0
    n = len(residency.nbytes)
    if not tight.any() or not n:
        return np.zeros(n, np.int8) if not tight.any() else None
    unit = float(max(residency.nbytes.max(), 1))  # numbers near 1 for the solver
    away = (residency.absent[:, tight] * residency.nbytes[:, None]).T / unit
    found = milp(
        residency.nbytes / unit,
        integrality=np.ones(n),
        bounds=Bounds(0, 1),
        constraints=LinearConstraint(away, lb=needed[tight] / unit),
        options={} if limit_s is None else {"time_limit": limit_s},
    )
    return None if found.x is None else np.round(found.x).astype(np.int8)
