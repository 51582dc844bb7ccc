"""``sc``: static compression. All tensors that vDNN moves go through ZVC, regardless of the cost.

This is CSwap+'s baseline "SC", an emulation of cDMA (Rhu et al., HPCA 2018) on the device.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.policy_tools.vdnn import feature_inputs, prefetch_points
from cswap.plan.simulate import SWAP

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap vDNN's tensors, all compressed; raw if the machine has no rate for ZVC."""
    simulator = problem.simulator
    moved = feature_inputs(problem.trace)
    action = np.where(moved, SWAP, 0).astype(np.int8)
    codec = np.zeros_like(action)
    if "zvc" in simulator.codecs:
        codec[moved] = simulator.codecs.index("zvc")
    return simulator.to_plan(action, codec, prefetch_points(simulator, moved), "sc")
