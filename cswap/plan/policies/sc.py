"""``sc``: static compression, everything that vDNN moves goes through ZVC, whatever that costs.

CSwap+'s baseline "SC", which stands for cDMA (Rhu et al., HPCA 2018) emulated on the device. Where
the trace allows ZFP (`cswap.plan.policies.cswap_plus`), dense tensors go through it at the rate
that ``cswap+`` has in that epoch: our reading of SC for dense networks, which the paper does not
spell out.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.policy_tools.layerwise import swaps
from cswap.plan.policy_tools.vdnn import feature_inputs, prefetch_points
from cswap.plan.policy_tools.zfp_rate import dense_positions, rate_of
from cswap.plan.simulate import SWAP

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Swap what vDNN swaps, all of it compressed; raw where the machine has no rate of ZVC."""
    return solve_epoch(problem, 0, 1)


def solve_epoch(problem: Problem, epoch: int, epochs: int) -> Plan:
    """The plan of one epoch of several; only ZFP's rate depends on it."""
    simulator = problem.simulator
    moved = feature_inputs(problem.trace)
    action = np.where(moved, SWAP, 0).astype(np.int8)
    codec = np.zeros_like(action)
    if "zvc" in simulator.codecs:
        codec[moved] = simulator.codecs.index("zvc")
    ways = swaps(simulator, moved)
    chosen = rate_of(simulator, ways, epoch, epochs)
    if chosen is not None:
        codec[dense_positions(simulator, ways)] = simulator.codecs.index(chosen)
    return simulator.to_plan(action, codec, prefetch_points(simulator, moved), "sc")


def rate(problem: Problem, epoch: int, epochs: int) -> str | None:
    """ZFP at the rate of an epoch, such as ``zfp:12``; None: nothing is compressed lossily."""
    simulator = problem.simulator
    moved = feature_inputs(problem.trace)
    return rate_of(simulator, swaps(simulator, moved), epoch, epochs)
