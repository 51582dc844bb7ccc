"""Starts of swap-ins that a plan leaves to whoever follows it: "as early as memory allows"."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cswap.plan.policy_tools.cutting import rank

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan

MOST_SLOWER: Final = 0.01
"""Share of the step that such starts may cost: they count saved tensors, not operators."""


def with_starts(problem: Problem, plan: Plan) -> Plan:
    """The same plan with the simulator's starts, so that an engine keeps within the same memory.

    The simulator knows the memory that later operators need, and an engine does not: by its own
    measure it fills the memory with tensors that come back, and then an operator allocates beyond
    the budget. A plan in sections stays as it is, and so does one that would become slower or
    infeasible.
    """
    decisions = plan.decisions.values()
    if any(d.section_bytes for d in decisions):
        return plan
    if all(d.prefetch is not None for d in decisions if d.action == "swap"):
        return plan
    simulator = problem.simulator
    made = simulator.to_plan(*simulator.from_plan(plan), policy=plan.policy)
    slower = made.predicted["step_s"] > (1 + MOST_SLOWER) * plan.predicted["step_s"]
    return plan if slower or rank(made)[0] else replace(made, budget_bytes=plan.budget_bytes)
