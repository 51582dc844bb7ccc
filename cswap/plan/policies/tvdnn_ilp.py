"""``tvdnn-ilp``: an integer program selects the tensors to swap, in sections, with least stalls.

This is our reading of tvDNN (Park et al., PPoPP 2018), of which only the abstract was available. It
mentions memory objects cut into sections that are swapped independently, and an optimal schedule by
ILP. The program is in `policy_tools.swap_ilp`, and HiGHS solves it.

In the program, memory is freed continuously and copies have no latency. In the simulator, sections
have a size (`policy_tools.cutting`). So the simulator evaluates several plans: the program's
solution and the relaxation's solution rounded up, each with whole tensors and in sections. The best
is the plan.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.policy_tools.cutting import in_sections, rank
from cswap.plan.policy_tools.swap_ilp import Program
from cswap.plan.simulate import SWAP

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.plan.policy_tools.swap_ilp import Flow
    from cswap.schema.plan import Plan

LIMIT_S: Final = 60.0
"""Time limit of the relaxation and of the integer program each, if the problem has no deadline."""

SLICE_S: Final = 2.0
"""Time limit of the first attempt."""

RELAXED_SHARE: Final = 0.25
"""Share of the time limit for the relaxation, which is solved first."""

ROUND_UP: Final = 1e-3
"""A tensor leaves as a whole if more than this share of it leaves in the relaxation."""


def solve(problem: Problem) -> Plan:
    """Return the best of the solutions' plans."""
    plans = [
        plan
        for moved in _choices(problem)
        for whole in (_plan(problem, moved),)
        for plan in (whole, in_sections(problem, whole))
    ]
    return min(plans, key=rank)


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
    # Repeated with doubled time limits: HiGHS runs in C, where Ctrl-C has no effect until it ends.
    end_s = time.monotonic() + LIMIT_S
    if problem.deadline is not None:
        end_s = time.monotonic() + max(0.1, share * (problem.deadline - time.monotonic()))
    best, slice_s = None, SLICE_S
    while not problem.interrupt.is_set() and (left_s := end_s - time.monotonic()) > 0:
        began_s = time.monotonic()
        found = program.solve(relaxed=relaxed, limit_s=min(slice_s, left_s))
        best = found or best
        if time.monotonic() - began_s < 0.9 * slice_s:
            break  # it finished before the limit
        slice_s *= 2
    return best


def _plan(problem: Problem, moved: NDArray[np.int8]) -> Plan:
    return problem.simulator.to_plan(moved, np.zeros_like(moved), policy="tvdnn-ilp")
