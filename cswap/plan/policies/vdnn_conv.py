"""``vdnn-conv``: swaps the inputs of convolutions, which run long enough to hide the copies.

See `cswap.plan.policy_tools.vdnn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.plan.policy_tools.vdnn import CONV, FEATURES, features_of, inputs_of, offload

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Offload the input X of every convolution; for a model without any, act as ``vdnn-all``."""
    trace = problem.trace
    kinds = CONV if features_of(trace) == FEATURES else features_of(trace)
    return offload(problem, inputs_of(trace, kinds), "vdnn-conv")
