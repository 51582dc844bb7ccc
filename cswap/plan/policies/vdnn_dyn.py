"""``vdnn-dyn``: offloads nothing if the step fits, else convolutions' inputs, else all inputs.

See `policy_tools.vdnn`. The paper also selects faster or smaller convolution algorithms. This is
not modelled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.policy_tools.vdnn import CONV, feature_inputs, inputs_of, offload

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """The first plan of none, conv and all that fits the budget; all if none of them fits."""
    trace = problem.trace
    everything = feature_inputs(trace)
    tries = (np.zeros_like(everything), inputs_of(trace, CONV), everything)
    plans = [offload(problem, moved, "vdnn-dyn") for moved in tries]
    return next((plan for plan in plans if plan.predicted["feasible"]), plans[-1])
