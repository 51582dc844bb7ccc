"""Simulates one plan: step time, exposed time by cause, memory, and violated limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from cswap.plan.simulator import state
from cswap.plan.simulator.sections import split
from cswap.plan.simulator.simulator import (
    CAUSES,
    KEEP,
    RECOMPUTE,
    SWAP,
    RunResult,
    Simulator,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

    from numpy.typing import NDArray

    from cswap.plan.hardware import Hardware
    from cswap.schema.plan import Plan
    from cswap.schema.trace import Trace

__all__ = [
    "CAUSES",
    "KEEP",
    "RECOMPUTE",
    "SWAP",
    "RunResult",
    "Simulation",
    "Simulator",
    "simulate",
    "smallest_feasible_budget",
]


@dataclass(frozen=True, slots=True)
class Simulation:
    """The simulated cost of a plan.

    Attributes:
        step_s: end of the last operator.
        compute_s: sum of the operators' durations; step_s = compute_s + sum of exposed.
        exposed: exposed seconds by cause, see `CAUSES`.
        peak_bytes: maximum of device memory, resident bytes included. On unified hardware it
            includes the encodings.
        average_bytes: mean of device memory over time.
        host_peak_bytes: maximum of host memory.
        link_bytes: bytes copied in both directions together.
        feasible: whether the device and host budgets hold all the time and no tensor is lost.
        violations: texts on the violated limits; empty if feasible.
    """

    step_s: float
    compute_s: float
    exposed: Mapping[str, float]
    peak_bytes: int
    average_bytes: float
    host_peak_bytes: int
    link_bytes: int
    feasible: bool
    violations: tuple[str, ...] = ()


def simulate(
    trace: Trace,
    hardware: Hardware,
    plan: Plan,
    budget_bytes: int | None = None,
) -> Simulation:
    """Simulate a plan, with its sections.

    Args:
        trace: the step.
        hardware: the machine.
        plan: a decision for each saved tensor; tensors without a decision are kept.
        budget_bytes: device memory for the whole step; None: all memory of the device.

    Raises:
        ConfigError: the plan does not fit the trace or the hardware (the message names the entry).
    """
    simulator = Simulator(trace, hardware, budget_bytes)
    arrays = simulator.from_plan(plan)
    if any(d.section_bytes for d in plan.decisions.values()):
        simulator, arrays = _in_sections(simulator, plan, arrays)
    result = simulator.run(*arrays)
    return Simulation(
        step_s=result.step_s,
        compute_s=simulator.compute_s,
        exposed=dict(zip(CAUSES, result.exposed_s, strict=True)),
        peak_bytes=result.peak_bytes,
        average_bytes=result.average_bytes,
        host_peak_bytes=result.host_peak_bytes,
        link_bytes=result.link_bytes,
        feasible=result.feasible,
        violations=tuple(_violations(simulator, result)),
    )


def smallest_feasible_budget(trace: Trace, hardware: Hardware) -> int:
    """The smallest device memory in which some plan runs: every swappable tensor is swapped raw.

    Host memory is not limited here. On unified hardware it is an upper bound of this size, see
    `Simulator.floor_bytes`.
    """
    return Simulator(trace, hardware).floor_bytes()


_Arrays = tuple["NDArray[np.int8]", "NDArray[np.int8]", "NDArray[np.int32]"]


def _in_sections(whole: Simulator, plan: Plan, arrays: _Arrays) -> tuple[Simulator, _Arrays]:
    """Return the simulator of the cut trace; each section has the choice of its tensor."""
    tensor = dict(zip(whole.saved, whole.swappable, strict=True))
    wanted = {tensor[k]: d.section_bytes for k, d in plan.decisions.items() if d.section_bytes}
    trace, origin = split(whole.trace, wanted)
    simulator = Simulator(trace, whole.hardware, whole.budget_bytes)
    place = {t: p for p, t in enumerate(whole.swappable)}
    source = np.array([place[origin[t]] for t in simulator.swappable], np.int64)
    action, codec, prefetch = arrays[0][source], arrays[1][source], arrays[2][source]
    early = np.array(
        [
            (d := plan.decisions.get(saved)) is not None and d.prefetch is None
            for saved in whole.saved
        ],
        np.bool_,
    )[source]
    free = simulator.earliest_prefetch(action, codec)
    return simulator, (action, codec, np.where(early, free, prefetch).astype(np.int32))


def _violations(simulator: Simulator, result: RunResult) -> list[str]:
    flaws, texts = result.flaws, []
    if flaws & state.OVER_DEVICE:
        k = result.first_over
        operator = simulator.trace.operators[k].name if k >= 0 else ""
        texts.append(
            f"device memory: {result.peak_bytes} bytes of {simulator.budget_bytes}; first over "
            f"budget at operator {k} ({operator})"
        )
    if flaws & state.OVER_HOST:
        limit = simulator.hardware.host_memory_bytes
        texts.append(f"host memory: {result.host_peak_bytes} bytes of {limit}")
    if flaws & state.LOST_ANCESTOR:
        texts.append("recompute: an input of the recomputation is gone and has no producer")
    return texts
