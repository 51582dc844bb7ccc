"""SwapAdvisor's figures: share of the ideal throughput at many times the memory of a V100.

As published, any tensor may move, parameters included, and a step is timed by the paper's own
simulator (`cswap.plan.swapadvisor.as_published`); an engine's plans can move less.

The paper's Inception-4 and NasNet-25 are not here: the paper does not give their widened shapes,
and the zoo has neither network.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final

from bench.papers import brnn
from bench.papers.published import SWAPADVISOR, SWAPADVISOR_GB, SWAPADVISOR_LEAST
from bench.papers.row import NONE, ONE, Cell, Row
from bench.workloads.zoo import catalogue
from cswap.plan.estimate import estimate
from cswap.plan.hardware import load_hardware
from cswap.plan.simulator.lifetimes import live_bytes
from cswap.plan.swapadvisor.as_published import search_as_published

if TYPE_CHECKING:
    from torch import nn

    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace

TIME_LIMIT_S: Final = 30.0
GIB: Final = 1 << 30
NAMES: Final = {"rnn": "RNN-8-8K", "brnn": "BRNN-4-8K", "wresnet152": "WResNet-152-10"}
TWELFTH: Final = ("wresnet152", 64)
"""Network and batch that are also run at a twelfth of the memory that they need."""


def cells(*, quick: bool) -> list[Cell]:
    """The work, a cell per network and batch; quick: none."""
    found = [Cell(f"swapadvisor {m} {b}", partial(_rows, m, b)) for m, b in SWAPADVISOR]
    model, batch = TWELFTH
    twelfth = Cell(f"swapadvisor {model} {batch} twelfth", partial(_twelfth, model, batch))
    return [] if quick else [*found, twelfth]


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


def trace_of(model: str, batch: int, hardware: Hardware) -> Trace:
    """The estimated trace of a step whose parameters may move, too."""
    net: nn.Module
    if model == "brnn":
        net, (inputs, target) = brnn.brnn(), brnn.example(batch)
    else:
        net, (inputs, target) = catalogue.build(model), catalogue.example(model, batch)
    return estimate(
        net, inputs, catalogue.loss, target, hardware=hardware, name=NAMES[model], parameters=True
    )


def _rows(model: str, batch: int) -> list[Row]:
    ideal, on_demand, theirs = SWAPADVISOR[model, batch]
    hardware = machine()
    trace = trace_of(model, batch, hardware)
    details = {
        "published_ideal_samples_per_s": ideal,
        "published_on_demand_percent": 100 * on_demand / ideal,
    }
    what = f"{NAMES[model]}, batch {batch}"
    return [_row(what, trace, hardware, 100 * theirs / ideal, details)]


def _twelfth(model: str, batch: int) -> list[Row]:
    hardware = machine()
    trace = trace_of(model, batch, hardware)
    hardware = replace(hardware, memory_bytes=max(live_bytes(trace)) // 12)
    what = f"{NAMES[model]}, batch {batch}, in a twelfth of the memory that it needs"
    note = f"; published only for NasNet-25: {SWAPADVISOR_LEAST:g} % at 12 times the memory"
    return [_row(what, trace, hardware, None, {}, note)]


def _row(
    what: str,
    trace: Trace,
    hardware: Hardware,
    published: float | None,
    details: dict[str, float],
    note: str = "",
) -> Row:
    needed = max(live_bytes(trace))
    ideal_s = sum(o.duration_s for o in trace.operators)
    people = search_as_published(trace, hardware, hardware.memory_bytes, time_limit=TIME_LIMIT_S)
    best = next((one for one in people if not one.over_bytes), None)
    their_gb = ", ".join(f"{name}: {gb} GB" for name, gb in SWAPADVISOR_GB.items())
    why = (
        "operators' durations are a roofline's, and our network needs "
        f"{needed / GIB:.0f} GiB; the paper's networks need more ({their_gb}), their framework's "
        "copies and workspaces included"
    )
    if best is None:
        why = "the search found no plan that fits in its time; " + why
    return Row(
        "SwapAdvisor",
        f"{what}: share of the ideal throughput",
        "%",
        published,
        None if best is None else 100 * ideal_s / best.swaps.step_s,
        f"{hardware.name}, {needed / hardware.memory_bytes:.1f} times its memory, parameters "
        f"move; {TIME_LIMIT_S:g} s of search (paper: 30 min on 72 cores){note}",
        why,
        NONE if published is None else ONE,
        details={
            "needed_gib": needed / GIB,
            "operators": len(trace.operators),
            "ideal_samples_per_s": trace.batch / ideal_s,
            "copied_gib": None if best is None else best.swaps.copied_bytes / GIB,
            **details,
        },
    )
