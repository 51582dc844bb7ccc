"""Tables that compare policies, and tables of hardware profiles."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.plan.hardware import Hardware
    from cswap.plan.planner import Row
    from cswap.schema.plan import Plan

COLUMNS: Final = (
    *("policy", "step ms", "of ideal", "peak GiB", "average GiB", "host GiB", "over the link GiB"),
    *("keep / swap / recompute", "planned in s"),
)
DROPPED: Final = ("average GiB", "host GiB", "keep / swap / recompute", "over the link GiB")
"""Columns that a narrow terminal does without, the first to go first."""

UNIFIED_NOTE: Final = " Host memory is the device's own: encodings count in the budget."

HARDWARE_NOTE: Final = (
    "Figures are those of data sheets and publications, not measured: `cswap hardware show NAME`."
)
HARDWARE_COLUMNS: Final = (
    "name",
    "memory GB",
    "fp32 TFLOP/s",
    "memory GB/s",
    "D2H GB/s",
    "H2D GB/s",
)


def best(rows: Sequence[Row]) -> Plan:
    """The plan with the shortest simulated step.

    Raises:
        ConfigError: no policy found a plan.
    """
    found = [row for row in rows if row.plan is not None and row.simulation is not None]
    if not found:
        raise ConfigError("; ".join(row.error for row in rows) or "no policy was tried.")
    chosen = min(found, key=lambda row: row.simulation.step_s if row.simulation else 0.0).plan
    assert chosen is not None
    return chosen


def cells(row: Row) -> tuple[str, ...]:
    """A row of `COLUMNS`."""
    found = row.simulation
    if found is None or row.plan is None:
        return (row.policy, "no plan fits", *[""] * 6, f"{row.planning_s:.2f}")
    sizes = (found.peak_bytes, found.average_bytes, found.host_peak_bytes, found.link_bytes)
    actions = [decision.action for decision in row.plan.decisions.values()]
    return (
        row.policy,
        f"{1e3 * found.step_s:.2f}",
        f"{1 / row.slowdown:.1%}",
        *(f"{n / 2**30:.2f}" for n in sizes),
        " / ".join(str(actions.count(a)) for a in ("keep", "swap", "recompute")),
        f"{row.planning_s:.2f}",
    )


def record(row: Row) -> dict[str, Any]:
    """A row as plain data, for JSON."""
    simulation = None if row.simulation is None else asdict(row.simulation)
    return {
        "policy": row.policy,
        "simulation": simulation,
        "plan": None if row.plan is None else row.plan.to_dict(),
        "planning_s": row.planning_s,
        "error": row.error,
    }


def hardware_cells(hardware: Hardware) -> tuple[str, ...]:
    """A row of `HARDWARE_COLUMNS`."""
    flops = hardware.flops.get("float32")
    return (
        hardware.name,
        f"{hardware.memory_bytes / 1e9:.0f}",
        "" if flops is None else f"{flops.achievable / 1e12:.1f}",
        f"{hardware.memory_bytes_per_s / 1e9:.0f}",
        f"{hardware.d2h_bytes_per_s / 1e9:.1f}",
        f"{hardware.h2d_bytes_per_s / 1e9:.1f}",
    )
