"""``vdnn-all``: swaps the inputs of every feature-extraction layer (`policy_tools.vdnn`)."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.plan.policy_tools.vdnn import feature_inputs, offload

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Offload the input X of every convolution and pooling layer."""
    trace = problem.trace
    return offload(problem, feature_inputs(trace), "vdnn-all")
