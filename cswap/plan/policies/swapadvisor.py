"""``swapadvisor``: swaps the tensors that an operator's memory asks for, by their next use.

Source: Huang, Jin, Li, SwapAdvisor, ASPLOS 2020, section 4. The planner scans the operators in
order. Where one lacks room, the tensor leaves whose next use is furthest in the future (Belady);
tensors whose last use is at least a threshold ago go before all others. The paper gives no
threshold; ours is the duration of the swap-out.

The paper also searches for an order of operators and for sizes of memory pools (section 5). An
engine runs the model's own order, and has torch's allocator. So the search here is over the
capacity that the planner fills: with less of it, more tensors leave, and earlier. The simulator
judges each set of swaps. The paper moves any tensor at any time, parameters included; an engine
moves saved tensors, once each.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.policy_tools.search import Best
from cswap.plan.simulate import SWAP
from cswap.plan.simulator.lifetimes import lifetimes

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.simulate import Simulator
    from cswap.schema.plan import Plan

CAPACITIES: Final = 48
"""Capacities that are tried, from the least with which the step runs to the budget."""


def solve(problem: Problem) -> Plan:
    """The best of the swap sets, of which moving every tensor is one."""
    simulator = problem.simulator
    best = Best(simulator)
    _judge(best, np.full(len(simulator.saved), SWAP, np.int8))
    for capacity in np.linspace(problem.budget_bytes, simulator.floor_bytes(), CAPACITIES):
        if problem.stopped():
            break
        _judge(best, moved(simulator, capacity))
    assert best.action is not None
    return simulator.to_plan(best.action, np.zeros_like(best.action), policy="swapadvisor")


def _judge(best: Best, action: NDArray[np.int8]) -> None:
    raw = np.zeros_like(action)
    best.consider(action, raw, best.simulator.earliest_prefetch(action, raw))


def moved(simulator: Simulator, capacity: float) -> NDArray[np.int8]:
    """[n] the action of each position if operators may hold so many bytes."""
    trace, life = simulator.trace, lifetimes(simulator.trace)
    nbytes = [tensor.nbytes for tensor in trace.tensors]
    place = {t: p for p, t in enumerate(life.swappable)}
    action = np.zeros(len(place), np.int8)
    held = trace.resident_bytes + sum(
        n for n, p in zip(nbytes, life.producer, strict=True) if p < 0
    )
    resting: dict[int, float] = {}  # tensors that may leave, with the end of their last use
    away: set[int] = set()
    now_s = 0.0

    def rank(t: int) -> tuple[bool, int]:
        return now_s - resting[t] >= simulator.d2h_s[place[t], 0], life.backward[t]

    for k, operator in enumerate(trace.operators):
        for t in operator.inputs:
            resting.pop(t, None)
            if t in away:
                away.remove(t)
                held += nbytes[t]
        held += sum(nbytes[t] for t in operator.outputs)
        while held + operator.workspace_bytes > capacity and resting:
            t = max(resting, key=rank)
            del resting[t]
            away.add(t)
            action[place[t]] = SWAP
            held -= nbytes[t]
        now_s += operator.duration_s
        for t in {*operator.inputs, *operator.outputs}:
            if life.last_use[t] == k:
                held -= nbytes[t]
            elif t in place and life.forward[t] == k:
                resting[t] = now_s
    return action
