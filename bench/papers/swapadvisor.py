"""SwapAdvisor's figures: share of the ideal throughput at many times the memory of a V100.

As published, any tensor may move, parameters included, and a step is timed by the paper's own
simulator (`cswap.plan.swapadvisor.anything`); an engine's plans can move less.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from bench.papers.published import SWAPADVISOR
from bench.papers.row import Cell, Row
from bench.workloads.zoo.catalogue import build, example, loss
from cswap.plan.estimate import estimate
from cswap.plan.hardware import load_hardware
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.plan.swapadvisor.anything import search_anything

if TYPE_CHECKING:
    from cswap.plan.hardware import Hardware

TIME_LIMIT_S: Final = 30.0
GIB: Final = 1 << 30
NAMES: Final = {"rnn": "RNN-8-8K", "wresnet152": "WResNet-152-10"}


def cells(*, quick: bool) -> list[Cell]:
    """The work, a cell per network and batch; quick: none."""
    found = [Cell(f"swapadvisor {m} {b}", partial(_rows, m, b)) for m, b in SWAPADVISOR]
    return [] if quick else found


def machine() -> Hardware:
    """A p3.2xlarge: V100 with 16 GB, 12 GB/s one way and 20 both ways (section 6).

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


def _rows(model: str, batch: int) -> list[Row]:
    ideal, on_demand, theirs = SWAPADVISOR[model, batch]
    hardware = machine()
    inputs, target = example(model, batch)
    trace = estimate(
        build(model), inputs, loss, target, hardware=hardware, name=NAMES[model], parameters=True
    )
    needed = max(live_bytes(trace))
    ideal_s = sum(o.duration_s for o in trace.operators)
    people = search_anything(trace, hardware, hardware.memory_bytes, time_limit=TIME_LIMIT_S)
    best = next((one for one in people if not one.over_bytes), None)
    why = (
        "operators' durations are a roofline's, and our networks need "
        f"{needed / GIB:.0f} GiB; the paper's need 118 GB (RNN, batch 256) and 180 GB (WResNet, "
        "batch 64), its frameworks' copies and workspaces included"
    )
    if best is None:
        why = "the search found no plan that fits in its time; " + why
    return [
        Row(
            "SwapAdvisor",
            f"{NAMES[model]}, batch {batch}: share of the ideal throughput",
            "%",
            100 * theirs / ideal,
            None if best is None else 100 * ideal_s / best.swaps.step_s,
            f"{hardware.name}, {needed / hardware.memory_bytes:.1f} times its memory, parameters "
            f"move; {TIME_LIMIT_S:g} s of search (paper: 30 min on 72 cores)",
            why,
            {
                "needed_gib": needed / GIB,
                "operators": len(trace.operators),
                "ideal_samples_per_s": batch / ideal_s,
                "published_ideal_samples_per_s": ideal,
                "published_on_demand_percent": 100 * on_demand / ideal,
                "copied_gib": None if best is None else best.swaps.copied_bytes / GIB,
            },
        )
    ]
