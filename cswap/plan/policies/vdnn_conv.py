"""``vdnn-conv``: the inputs of convolutions leave, which are long enough to hide it.

See `cswap.plan.policy_tools.vdnn`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.plan.policy_tools.vdnn import CONV, FEATURES, features_of, inputs_of, offload

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Offload X of every convolution; of a model without any, what ``vdnn-all`` does."""
    trace = problem.trace
    kinds = CONV if features_of(trace) == FEATURES else features_of(trace)
    return offload(problem, inputs_of(trace, kinds), "vdnn-conv")
