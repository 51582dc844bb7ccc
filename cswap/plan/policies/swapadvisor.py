"""``swapadvisor``: a genetic search over schedules and memory pools, which determine the swap set.

Source: SwapAdvisor, ASPLOS 2020, sections 4-5; see `cswap.plan.swapadvisor`. The paper moves any
tensor, parameters included; here a plan moves only saved tensors, once each and uncompressed. The
search uses the paper's simulator, which has memory
pools. Then our simulator, which has no pools, evaluates the best schedules and swap sets of the
search. The best of them is the plan. A schedule that gains less than the share `WORTH` over the
trace's own order is dropped, because an engine runs the model's own order.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.policy_tools.search import penalised_s
from cswap.plan.simulate import SWAP, Simulator
from cswap.plan.simulator.lifetimes import fingerprint
from cswap.plan.simulator.reorder import reordered
from cswap.plan.swapadvisor.demand import Demand
from cswap.plan.swapadvisor.genetic import EVALUATIONS, Search
from cswap.plan.swapadvisor.graph import graph_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.swapadvisor.swaps import Swaps
    from cswap.schema.plan import Plan

WORTH: Final = 0.001
FINALISTS: Final = 24


def solve(problem: Problem) -> Plan:
    """The best of the search's schedules and swap sets."""
    trace = problem.trace
    graph = graph_of(trace, problem.hardware)
    workspace = max((o.workspace_bytes for o in trace.operators), default=0)
    capacity = max(problem.budget_bytes - trace.resident_bytes - workspace, 1)
    search = Search(graph, Demand.of(trace, graph), capacity, problem.seed)
    search.run(_stopping(problem, search))
    judge = _Judge(problem)
    own = np.arange(len(trace.operators))
    for one in search.people[:FINALISTS]:
        judge.consider(own, one.swaps)
        judge.consider(one.order, one.swaps)
    return judge.plan()


def _stopping(problem: Problem, search: Search) -> Callable[[], bool]:
    def stopped() -> bool:
        done = search.evaluations
        problem.report(done / EVALUATIONS, f"{done} chromosomes")
        return problem.stopped()

    return stopped


class _Judge:
    """Simulates schedules with swap sets as plans, and keeps the best.

    The plan that swaps every tensor is always among them.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._rank, self._order = (np.inf, 0), np.empty(0, np.int64)
        self._moved: NDArray[np.int8] = np.empty(0, np.int8)
        self._own = np.arange(len(problem.trace.operators))
        self._keep(self._own, np.full(len(problem.simulator.saved), SWAP, np.int8))

    def consider(self, order: NDArray[np.int64], swaps: Swaps) -> None:
        """Simulate the schedule and the swap set of one chromosome."""
        swappable = np.array(self._problem.simulator.swappable, np.int64)
        self._keep(order, np.where(swaps.left[swappable], SWAP, 0).astype(np.int8))

    def _keep(self, order: NDArray[np.int64], moved: NDArray[np.int8]) -> None:
        simulator = self._simulator(order)
        if len(simulator.saved) != len(moved):
            return  # in this order the set of swappable tensors differs
        raw = np.zeros_like(moved)
        result = simulator.run(moved, raw, simulator.earliest_prefetch(moved, raw))
        cost_s = penalised_s(result, simulator)
        if (order != self._own).any():
            cost_s *= 1 + WORTH
        rank = cost_s, result.link_bytes  # with equal step times, fewer bytes are better
        if rank < self._rank:
            self._rank, self._order, self._moved = rank, order, moved

    def _simulator(self, order: NDArray[np.int64]) -> Simulator:
        problem = self._problem
        if (order == self._own).all():
            return problem.simulator
        trace = reordered(problem.trace, order.tolist())
        return Simulator(trace, problem.hardware, problem.budget_bytes)

    def plan(self) -> Plan:
        """The best plan."""
        simulator = self._simulator(self._order)
        made = simulator.to_plan(self._moved, np.zeros_like(self._moved), policy="swapadvisor")
        if simulator is self._problem.simulator:
            return made
        own = fingerprint(self._problem.trace)
        return replace(made, order=tuple(self._order.tolist()), trace_fingerprint=own)
