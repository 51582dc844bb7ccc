"""From a trace, a machine and a budget to a plan, by any policy; and all of them in one table."""

from __future__ import annotations

import importlib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final

from cswap.errors import BudgetError, ConfigError
from cswap.plan.hardware import load_hardware
from cswap.plan.lifetimes import fingerprint
from cswap.plan.problem import Problem, silent
from cswap.plan.search import interruptible
from cswap.plan.simulate import Simulation, simulate, smallest_feasible_budget
from cswap.schema.trace import Trace

if TYPE_CHECKING:
    from cswap.plan.problem import Report
    from cswap.schema.plan import Plan

POLICIES: Final[dict[str, str]] = {
    "none": "cswap.plan.policies.none",
    "oracle": "cswap.plan.policies.oracle",
    "vdnn-all": "cswap.plan.policies.vdnn_all",
    "vdnn-conv": "cswap.plan.policies.vdnn_conv",
    "vdnn-dyn": "cswap.plan.policies.vdnn_dyn",
    "tvdnn-ilp": "cswap.plan.policies.tvdnn_ilp",
    "tvdnn-heuristic": "cswap.plan.policies.tvdnn_heuristic",
    "swapadvisor": "cswap.plan.policies.swapadvisor",
    "home": "cswap.plan.policies.home",
    "capuchin": "cswap.plan.policies.capuchin",
    "cswap+": "cswap.plan.policies.cswap_plus",
    "joint": "cswap.plan.policies.joint",
}
"""Policy to the module whose ``solve`` makes its plan."""

UNBOUNDED: Final = ("oracle",)
"""Policies that are granted as much memory as they like."""
