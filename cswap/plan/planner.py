"""Makes a plan from a trace, a machine and a budget by any policy, and compares policies."""

from __future__ import annotations

import importlib
import math
import threading
import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any, Final

from cswap.display import MOST_SHOWN, shown
from cswap.errors import BudgetError, ConfigError, HardwareError
from cswap.plan.hardware import load_hardware
from cswap.plan.policy_tools.problem import Problem, silent
from cswap.plan.policy_tools.search import interruptible
from cswap.plan.policy_tools.starts import with_starts
from cswap.plan.simulate import Simulation, simulate, smallest_feasible_budget
from cswap.schema.checks import MOST_MEMORY, Checks
from cswap.schema.plan import Plan
from cswap.schema.trace import Trace
from cswap_kernels.jit import compile_s

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable

    from cswap.plan.hardware import Hardware
    from cswap.plan.policy_tools.problem import Report

POLICIES: Final[dict[str, str]] = {
    "none": "cswap.plan.policies.none",
    "vdnn-all": "cswap.plan.policies.vdnn_all",
    "vdnn-conv": "cswap.plan.policies.vdnn_conv",
    "vdnn-dyn": "cswap.plan.policies.vdnn_dyn",
    "tvdnn-ilp": "cswap.plan.policies.tvdnn_ilp",
    "tvdnn-heuristic": "cswap.plan.policies.tvdnn_heuristic",
    "swapadvisor": "cswap.plan.policies.swapadvisor",
    "home": "cswap.plan.policies.home",
    "capuchin": "cswap.plan.policies.capuchin",
    "sc": "cswap.plan.policies.sc",
    "cswap+": "cswap.plan.policies.cswap_plus",
    "joint": "cswap.plan.policies.joint",
}
"""The module of each policy; its function ``solve`` makes the plan."""

_CHECK: Final = Checks(ConfigError)

_compiled = threading.Event()
"""Whether this process has run the simulator."""


@dataclass(frozen=True, slots=True)
class Row:
    """One policy in a comparison; every figure is simulated.

    Attributes:
        policy: name of the policy.
        simulation: simulation of its plan; None if there is no plan.
        plan: its plan; None if no plan of the policy fits the budget.
        planning_s: wall time of planning, without the compilation of kernels.
        slowdown: step time divided by the time of the same step with enough memory; infinite
            without a plan.
        error: the reason why there is no plan; empty if there is a plan.
    """

    policy: str
    simulation: Simulation | None
    plan: Plan | None
    planning_s: float
    slowdown: float
    error: str = ""


def plan(
    trace: Any,
    hardware: Any,
    budget: int | None = None,
    policy: str = "joint",
    *,
    seed: int = 0,
    time_limit: float | None = None,
    recompute: bool | Collection[int] = False,
    stoppable: bool = True,
    progress: Report | None = None,
) -> Plan:
    """Make a plan within the budget, by one policy.

    Args:
        trace: a `Trace`, a dict, JSON text or a path.
        hardware: a `Hardware`, the name of a profile, a dict or a path.
        budget: bytes of device memory for the whole step; None: all memory of the device.
        policy: one of `POLICIES`.
        seed: seed of every random choice.
        time_limit: seconds after which the best plan so far is returned; None: the policy decides.
        recompute: whether the plan may recompute tensors; or the positions of those that it may.
            An engine recomputes whole modules, and single tensors where it finds a short chain of
            operators; it swaps the others.
        stoppable: whether the first Ctrl-C in the main thread ends the search with the best plan so
            far. Otherwise it raises KeyboardInterrupt as usual.
        progress: called with the fraction done and a text.

    Raises:
        BudgetError: no plan of this policy fits. The error holds the smallest budget that some
            plan fits.
        ConfigError: the trace, the hardware or an argument is wrong (the message names it), or the
            trace was estimated for a machine that computes at other rates.
    """
    problem = _problem(trace, hardware, budget, seed, time_limit, recompute, progress)
    made = _solve(problem, policy, stoppable=stoppable)
    _judged(problem, policy, made)
    return with_starts(problem, made)


def compare(
    trace: Any,
    hardware: Any,
    budget: int | None = None,
    policies: Iterable[str] | None = None,
    *,
    seed: int = 0,
    time_limit: float | None = None,
    recompute: bool | Collection[int] = False,
    stoppable: bool = True,
    progress: Report | None = None,
) -> list[Row]:
    """Compare several policies on the same step, machine and budget.

    If no plan of a policy fits, its row has no plan and gives the reason.

    Args:
        trace: as for `plan`.
        hardware: as for `plan`.
        budget: as for `plan`.
        policies: names in the wanted order; None: all.
        seed: seed of every random choice.
        time_limit: seconds for each policy; None: the policy decides.
        recompute: as for `plan`.
        stoppable: as for `plan`. Policies that are left after Ctrl-C are not run and have no row.
        progress: called with the fraction of all policies done and a text.

    Raises:
        ConfigError: the trace, the hardware or an argument is wrong (the message names it).
    """
    names = list(POLICIES if policies is None else policies)
    for name in names:
        _module(name)
    report, rows = progress or silent, list[Row]()
    for index, name in enumerate(names):

        def part(done: float, text: str, index: int = index, name: str = name) -> None:
            report((index + done) / len(names), f"{name}: {text}")

        problem = _problem(trace, hardware, budget, seed, time_limit, recompute, part)
        rows.append(_row(problem, name, stoppable=stoppable))
        if problem.interrupt.is_set():
            break
    return rows


def _row(problem: Problem, policy: str, *, stoppable: bool) -> Row:
    began = time.monotonic() - compile_s()
    try:
        made = _solve(problem, policy, stoppable=stoppable)
        simulation = _judged(problem, policy, made)
    except BudgetError as error:
        return Row(policy, None, None, time.monotonic() - compile_s() - began, math.inf, str(error))
    ideal_s = problem.simulator.compute_s
    slowdown = simulation.step_s / ideal_s if ideal_s else 1.0
    seconds = time.monotonic() - compile_s() - began
    return Row(policy, simulation, with_starts(problem, made), seconds, slowdown)


def _problem(
    trace: Any,
    hardware: Any,
    budget: int | None,
    seed: int,
    time_limit: float | None,
    recompute: bool | Collection[int],
    progress: Report | None,
) -> Problem:
    step, machine = Trace.parse(trace), load_hardware(hardware)
    _check_durations(step, machine)
    _CHECK.count("seed", seed)
    _compile_loops(step, machine)
    deadline = None
    if time_limit is not None:
        if not _CHECK.seconds("time_limit", time_limit) > 0:
            raise ConfigError(f"time_limit={shown(time_limit)}: must be > 0 seconds.")
        deadline = time.monotonic() + time_limit
    nbytes = _budget(budget, machine)
    return Problem(step, machine, nbytes, seed, deadline, recompute, progress or silent)


def _check_durations(trace: Trace, hardware: Hardware) -> None:
    # An estimate's durations are a roofline's. They hold on every profile with the same roofline,
    # such as one with another link. Names of measured devices are not those of profiles.
    if trace.source != "estimated" or trace.hardware in ("", hardware.name):
        return
    try:
        theirs = load_hardware(trace.hardware)
    except HardwareError:
        theirs = None
    if theirs is None or _roofline(theirs) != _roofline(hardware):
        raise ConfigError(
            f"trace.hardware={shown(trace.hardware)}: its durations were estimated for that "
            f"machine, not for {shown(hardware.name)}. Estimate it again: "
            f"cswap.estimate(..., hardware={shown(hardware.name)})."
        )


def _roofline(hardware: Hardware) -> tuple[object, ...]:
    return {**hardware.flops}, hardware.memory_bytes_per_s


def _compile_loops(trace: Trace, hardware: Hardware) -> None:
    # Before the time for planning begins: the simulator's loops take seconds to compile.
    if not _compiled.is_set():
        simulate(trace, hardware, Plan())
        _compiled.set()


def _budget(budget: Any, hardware: Hardware) -> int:
    if budget is None:
        return hardware.memory_bytes
    return _CHECK.count("budget", budget, 1, MOST_MEMORY)


def _module(policy: str) -> Any:
    if policy not in POLICIES:
        close = get_close_matches(policy[:MOST_SHOWN], POLICIES, n=1)
        hint = f" Did you mean {close[0]!r}?" if close else ""
        known = ", ".join(POLICIES)
        raise ConfigError(f"policy={shown(policy)}: no such policy.{hint} Known: {known}.")
    return importlib.import_module(POLICIES[policy])


def _solve(problem: Problem, policy: str, *, stoppable: bool = True) -> Plan:
    """Make the policy's plan; raise at once if no plan at all fits the budget."""
    module = _module(policy)
    if not problem.hardware.unified:
        smallest = smallest_feasible_budget(problem.trace, problem.hardware)
        if problem.budget_bytes < smallest:
            raise BudgetError(problem.budget_bytes, smallest, "no plan runs in this budget.")
    with interruptible(problem) if stoppable else nullcontext():
        made: Plan = module.solve(problem)
    return replace(made, policy=policy)


def _judged(problem: Problem, policy: str, made: Plan) -> Simulation:
    """The plan's simulation; raises if it does not fit the budget."""
    simulation = simulate(problem.trace, problem.hardware, made, problem.budget_bytes)
    if not simulation.feasible:
        broken = "; ".join(simulation.violations)
        why = f"policy {policy!r} found no plan that runs in this budget ({broken})."
        smallest = smallest_feasible_budget(problem.trace, problem.hardware)
        raise BudgetError(problem.budget_bytes, smallest, why)
    return simulation
