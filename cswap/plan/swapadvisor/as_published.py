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


def search_as_published(
    trace: Trace,
    hardware: Hardware,
    budget_bytes: int,
    *,
    seed: int = 0,
    time_limit: float = 60.0,
    evaluations: int = EVALUATIONS,
    progress: Report = silent,
) -> list[Individual]:
    """Run a search; return its last generation, best first, as SwapAdvisor's simulator ranks it.

    An engine cannot run such plans, because it moves only tensors that autograd saves. The plans
    serve for comparison with the paper.

    Args:
        trace: a trace; estimated with ``parameters=True`` if parameters may move.
        hardware: the machine.
        budget_bytes: device memory for the whole step.
        seed: seed of every random choice.
        time_limit: seconds.
        evaluations: largest number of chromosomes.
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
