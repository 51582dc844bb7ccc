"""SwapAdvisor as published: any tensor may move at any time, parameters included."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

from cswap.plan.policy_tools.problem import silent
from cswap.plan.swapadvisor.demand import Demand
from cswap.plan.swapadvisor.genetic import EVALUATIONS, Search
from cswap.plan.swapadvisor.graph import graph_of

if TYPE_CHECKING:
    from cswap.plan.hardware import Hardware
    from cswap.plan.policy_tools.problem import Report
    from cswap.plan.swapadvisor.genetic import Individual
    from cswap.schema.trace import Trace


def search_anything(
    trace: Trace,
    hardware: Hardware,
    budget_bytes: int,
    *,
    seed: int = 0,
    time_limit: float = 60.0,
    evaluations: int = EVALUATIONS,
    progress: Report = silent,
) -> list[Individual]:
    """The last generation of a search, the best first; judged by SwapAdvisor's own simulator.

    Such plans are not for an engine, which moves what autograd saves; they are for comparison with
    the paper.

    Args:
        trace: estimated with ``parameters=True``, if parameters are to move.
        hardware: the machine.
        budget_bytes: device memory for all of the step.
        seed: of every random choice.
        time_limit: seconds.
        evaluations: chromosomes at most.
        progress: called with the fraction done and a text.
    """
    graph = graph_of(trace, hardware, anything=True)
    workspace = max((o.workspace_bytes for o in trace.operators), default=0)
    capacity = max(budget_bytes - trace.resident_bytes - workspace, 1)
    search = Search(graph, Demand.of(trace, graph), capacity, seed)
    began_s = time.monotonic()

    def stopped() -> bool:
        spent = (time.monotonic() - began_s) / time_limit
        progress(min(max(spent, search.evaluations / evaluations), 1.0), "chromosomes")
        return spent >= 1

    search.run(stopped, evaluations)
    return search.people
