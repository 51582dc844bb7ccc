"""``capuchin``: swap the tensors with the most free time, then the cheaper of swap and recompute.

Source: Peng et al., Capuchin, ASPLOS 2020. Free time FT = start of the swap-in - end of the
swap-out. The paper orders candidates by FT. When no free swap is left, it recomputes by memory
saved per second (MSPS). Here the simulator decides whether a plan is feasible. The paper moves a
late swap-in 5 % earlier in the next iteration; here `Simulator.earliest_prefetch` sets the starts.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.policy_tools.recompute_cost import chain_s
from cswap.plan.simulate import RECOMPUTE, SWAP

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.simulate import Simulator
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """The fewest candidates, in Capuchin's order, with which the step fits."""
    simulator = problem.simulator
    actions, order = _ranked(simulator)
    raw = np.zeros(len(order), np.int8)

    def first(count: int) -> NDArray[np.int8]:
        action = np.zeros(len(order), np.int8)
        chosen = order[:count]
        action[chosen] = actions[chosen]
        return action

    def fits(count: int) -> bool:
        action = first(count)
        starts = simulator.earliest_prefetch(action, raw)
        return simulator.run(action, raw, starts).feasible

    low, high = 0, len(order)
    while low < high and not problem.stopped():
        middle = (low + high) // 2
        if fits(middle):
            high = middle
        else:
            low = middle + 1
    return simulator.to_plan(first(high), raw, policy="capuchin")


def _ranked(simulator: Simulator) -> tuple[NDArray[np.int8], NDArray[np.int64]]:
    # The action for each position if it is chosen, and the positions in the order of choice.
    seconds = [operator.duration_s for operator in simulator.trace.operators]
    ends = np.cumsum(seconds, dtype=np.float64)
    gap_s = ends[simulator.backward - 1] - ends[simulator.forward]
    swap_s = simulator.d2h_s[:, 0] + simulator.h2d_s[:, 0]
    free_s = gap_s - swap_s
    again_s = chain_s(simulator)
    exposed_s = np.maximum(-free_s, 0.0)
    recompute = (free_s < 0) & simulator.recomputable & (again_s < exposed_s)
    actions = np.where(recompute, RECOMPUTE, SWAP).astype(np.int8)
    cost_s = np.where(recompute, again_s, exposed_s)
    # Free swaps first, those with the most free time before others; then by seconds lost per byte.
    per_byte = np.where(cost_s > 0, cost_s / simulator.nbytes, 0.0)
    order = np.lexsort((-free_s, per_byte))
    return actions, order.astype(np.int64)
