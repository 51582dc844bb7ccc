"""Plans in sections: large tensors leave and return piece by piece."""

from __future__ import annotations

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Final

from cswap.plan.simulate import simulate
from cswap.plan.simulator.simulator import predictions

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan

SECTION_BYTES: Final = 32 << 20


def in_sections(problem: Problem, plan: Plan) -> Plan:
    """The same plan in sections of `SECTION_BYTES`, with the figures of its own simulation."""
    large = {
        position: replace(decision, section_bytes=SECTION_BYTES)
        for position, decision in plan.decisions.items()
        if decision.action == "swap" and (decision.nbytes or 0) > SECTION_BYTES
    }
    if not large:
        return plan
    cut = replace(plan, decisions={**plan.decisions, **large})
    found = simulate(problem.trace, problem.hardware, cut, problem.budget_bytes)
    return replace(cut, predicted=predictions(asdict(found), found.compute_s))


def rank(plan: Plan) -> tuple[bool, float, float]:
    """Sorts plans: feasible ones first, then by step time, then by bytes on the link."""
    predicted = plan.predicted
    step_s = round(predicted["step_s"] / max(predicted["compute_s"], 1e-12), 9)
    return not predicted["feasible"], step_s, predicted["link_bytes"]
