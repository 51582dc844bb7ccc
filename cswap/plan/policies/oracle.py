"""``oracle``: the same step on a device with enough memory, the reference of all other policies."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulate import KEEP, Simulator
from cswap.plan.simulator.lifetimes import live_bytes

if TYPE_CHECKING:
    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan


def solve(problem: Problem) -> Plan:
    """Keep every tensor, with as much memory as the step needs."""
    needed = max(live_bytes(problem.trace), default=0)
    enough = max(needed, problem.hardware.memory_bytes, problem.budget_bytes)
    hardware = replace(problem.hardware, memory_bytes=enough)
    simulator = Simulator(problem.trace, hardware, enough)
    keep = np.full(len(simulator.saved), KEEP, np.int8)
    return simulator.to_plan(keep, np.zeros_like(keep), policy="oracle")
