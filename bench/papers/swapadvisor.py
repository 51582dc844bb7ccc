"""SwapAdvisor's figures: share of the ideal throughput at many times the memory of a V100."""

from __future__ import annotations

from dataclasses import fields, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bench.papers.published import SWAPADVISOR
from bench.papers.row import Cell, Row
from bench.zoo.catalogue import build, example, loss
from cswap.errors import BudgetError
from cswap.plan.estimate import EstimateOptions, estimate
from cswap.plan.hardware import load_hardware
from cswap.plan.lifetimes import live_bytes
from cswap.plan.planner import available, plan

if TYPE_CHECKING:
    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace

POLICIES: Final = ("swapadvisor", "joint")
TIME_LIMIT_S: Final = 60.0
GIB: Final = 1 << 30
NAMES: Final = {"rnn": "RNN-8-8K", "wresnet152": "WResNet-152-10"}


def cells(*, quick: bool) -> list[Cell]:
    """The work, a cell per network and batch; quick: none."""
    return (
        []
        if quick
        else [Cell(f"swapadvisor {m} {b}", partial(_rows, m, b)) for m, b in SWAPADVISOR]
    )


def machine() -> Hardware:
    """A p3.2xlarge: V100 with 16 GB, 12 GB/s one way and 20 both ways (section 6), 61 GB of host.

    Host memory is left unlimited: the paper took a larger host where 61 GB did not do.
    """
    return replace(
        load_hardware("v100-pcie3"),
        name="v100-16gb-pcie3",
        memory_bytes=16 * GIB,
        d2h_bytes_per_s=12e9,
        h2d_bytes_per_s=12e9,
        duplex_factor=20 / 24,
        host_memory_bytes=0,
    )


def _trace(model: str, batch: int, hardware: Hardware) -> Trace:
    inputs, target = example(model, batch)
    options: dict[str, Any] = {"name": NAMES[model]}
    if can_swap_parameters():
        options["parameters"] = True
    return estimate(build(model), inputs, loss, target, hardware=hardware, **options)


def can_swap_parameters() -> bool:
    """Whether estimated traces may have parameters as tensors that a plan can move."""
    return any(f.name == "parameters" for f in fields(EstimateOptions))


def _rows(model: str, batch: int) -> list[Row]:
    ideal, on_demand, theirs = SWAPADVISOR[model, batch]
    hardware = machine()
    trace = _trace(model, batch, hardware)
    needed = max(live_bytes(trace))
    compute_s = sum(o.duration_s for o in trace.operators)
    details = {
        "needed_gib": needed / GIB,
        "of_memory": needed / hardware.memory_bytes,
        "ideal_samples_per_s": batch / compute_s,
        "published_ideal_samples_per_s": ideal,
        "published_on_demand_share": on_demand / ideal,
    }
    return [_row(p, model, batch, trace, hardware, theirs / ideal, details) for p in POLICIES]


def _row(
    policy: str,
    model: str,
    batch: int,
    trace: Trace,
    hardware: Hardware,
    published: float,
    details: dict[str, Any],
) -> Row:
    ours, why = None, "operators' durations are a roofline's"
    if policy not in available():
        why = f"policy {policy!r} is not here"
    else:
        try:
            made = plan(trace, hardware, policy=policy, time_limit=TIME_LIMIT_S)
            ours = 100 * sum(o.duration_s for o in trace.operators) / made.predicted["step_s"]
        except BudgetError as error:
            why = f"no plan fits: {error}"
            if not can_swap_parameters():
                why += " (parameters stay on the device in our traces)"
    return Row(
        "SwapAdvisor",
        f"{NAMES[model]}, batch {batch}: share of the ideal, policy {policy}",
        "%",
        100 * published if policy == "swapadvisor" else None,
        ours,
        f"{hardware.name}, {details['needed_gib']:.0f} GiB needed, "
        f"{details['of_memory']:.1f} times the memory; {TIME_LIMIT_S:g} s of search (paper: 30 min "
        "on 72 cores)",
        why,
        details,
    )
