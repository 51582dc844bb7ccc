"""``tvdnn-ilp``: which objects leave, in sections, with the least stalls, by ILP.

tvDNN-style, our reading: of the paper (Park et al., PPoPP 2018) only the abstract was available,
which speaks of memory objects cut into sections that are swapped independently and an optimal
schedule by ILP. The program is that of `policy_tools.swap_ilp`, solved by HiGHS. Memory is freed
section by section there, copies have no latency, and sections are ever so small; the simulator
has sections of `SECTION_BYTES`. So it judges the solution and the solution of the relaxation,
rounded up, whole and in sections, and the best is the plan.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.policy_tools.swap_ilp import Program
from cswap.plan.simulate import SWAP, simulate
from cswap.plan.simulator.simulator import predictions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.policy_tools.swap_ilp import Flow
    from cswap.schema.plan import Plan

SECTION_BYTES: Final = 32 << 20

LIMIT_S: Final = 60.0
"""For the relaxation and for whole numbers each, if the problem sets none."""

SLICE_S: Final = 2.0
"""Of the first attempt."""

RELAXED_SHARE: Final = 0.25
"""Of the time limit, that the relaxation may take, which is solved first."""

ROUND_UP: Final = 1e-3
"""Of a tensor, that must leave in the relaxation for it to leave as a whole."""


def solve(problem: Problem) -> Plan:
    """The best of what the solutions come to."""
    plans = [
        plan
        for moved in _choices(problem)
        for plan in (_plan(problem, moved), _cut(problem, moved))
    ]
    return min(plans, key=_rank)


def _choices(problem: Problem) -> Iterator[NDArray[np.int8]]:
    yield np.full(len(problem.simulator.saved), SWAP, np.int8)
    program = Program(problem.simulator)
    problem.report(0.0, "relaxation")
    relaxed = _solved(problem, program, share=RELAXED_SHARE, relaxed=True)
    if relaxed is not None:
        yield np.where(relaxed.raw > ROUND_UP, SWAP, 0).astype(np.int8)
    problem.report(RELAXED_SHARE, "whole numbers")
    whole = _solved(problem, program, share=1.0, relaxed=False)
    if whole is not None:
        yield whole.raw.astype(np.int8)


def _solved(problem: Problem, program: Program, *, share: float, relaxed: bool) -> Flow | None:
    # Again and again with twice the time: what runs in C does not hear Ctrl-C until it ends.
    end_s = time.monotonic() + LIMIT_S
    if problem.deadline is not None:
        end_s = time.monotonic() + max(0.1, share * (problem.deadline - time.monotonic()))
    best, slice_s = None, SLICE_S
    while not problem.interrupt.is_set() and (left_s := end_s - time.monotonic()) > 0:
        began_s = time.monotonic()
        found = program.solve(relaxed=relaxed, limit_s=min(slice_s, left_s))
        best = found or best
        if time.monotonic() - began_s < 0.9 * slice_s:
            break  # it needed no more
        slice_s *= 2
    return best


def _plan(problem: Problem, moved: NDArray[np.int8]) -> Plan:
    return problem.simulator.to_plan(moved, np.zeros_like(moved), policy="tvdnn-ilp")


def _cut(problem: Problem, moved: NDArray[np.int8]) -> Plan:
    """The same in sections; what is predicted is what simulating them says."""
    plan = _plan(problem, moved)
    large = {
        position: replace(decision, section_bytes=SECTION_BYTES)
        for position, decision in plan.decisions.items()
        if decision.action == "swap" and (decision.nbytes or 0) > SECTION_BYTES
    }
    if not large:
        return plan
    cut = replace(plan, decisions={**plan.decisions, **large})
    found = simulate(problem.trace, problem.hardware, cut, problem.budget_bytes)
    return replace(cut, predicted=predictions(found, found.compute_s))


def _rank(plan: Plan) -> tuple[bool, float, float]:
    # What fits before what does not; of equal steps the one that moves less.
    predicted = plan.predicted
    step_s = round(predicted["step_s"] / max(predicted["compute_s"], 1e-12), 9)
    return not predicted["feasible"], step_s, predicted["link_bytes"]
