"""Steps swapped in every way: as a table for terminals, as Markdown, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import UNKNOWN, add_point, draw_by_model, grouped_table, mib
from bench.swap.measure import MEMCPY
from bench.workloads.methods import DEMO, OFF, ON_CPU, UNLIMITED
from cswap.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.table import Table

HEADINGS: Final = (
    *("model", "method", "step ms", "step / off's", "peak saved MiB", "/ off's"),
    *("heap peak MiB", "bits of off"),
)
DROPPED: Final = ("heap peak MiB", "/ off's", "bits of off")
"""Columns that a narrow terminal does without, the first to go first."""

NOTE: Final = (
    "Steps take turns; ms: median with its 20 % and 80 % quantiles; step / off's: median of the "
    "quotients of like steps, with quartiles. Peak saved: most bytes that saved tensors held in a "
    "step, copies included. Heap: growth of all memory allocated. On a CPU the host's memory is "
    "the device's: save_on_cpu makes one copy from host to host, of parameters too, and gives that "
    "to backward; memcpy is the copies alone, there and back, with no step. slowdown=10: the least "
    "memory that ten times the time allows."
)
COLOURS: Final = {
    "off": BLACK,
    "checkpoint": GREEN,
    "checkpoint + save_on_cpu": GREEN,
    "save_on_cpu": ORANGE,
    "TRL OffloadActivations": PURPLE,
    "torchtune OffloadActivations": PURPLE,
    "cswap raw": SKY,
    "cswap lossless": BLUE,
    "cswap int8": VERMILION,
    UNLIMITED.name: BLUE,
    "lossless": SKY,
    "remat": BLUE,
    "int8": VERMILION,
}
"""The markers differ, too."""

MARKERS: Final = {
    **dict(zip(ON_CPU, "oPsXvv<D^d", strict=True)),
    **dict(zip(DEMO, "o<D^P", strict=True)),
}


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A row per model and method, of HEADINGS; one that failed says why under step ms."""
    return [[row["model"], row["method"], *_figures(row)] for row in document["rows"]]


def _figures(row: dict[str, Any]) -> list[str]:
    step, spread = row["step"], row["time_of_off_spread"]
    if step is None:
        return [row["failure"], *[UNKNOWN] * (len(HEADINGS) - 3)]
    ms = [f"{1e3 * step[key]:.1f}" for key in ("median_s", "low_s", "high_s")]
    quartiles = "" if spread is None else f" [{spread[0]:.2f}, {spread[1]:.2f}]"
    return [
        f"{ms[0]} [{ms[1]}, {ms[2]}]",
        UNKNOWN if row["time_of_off"] is None else f"{row['time_of_off']:.2f}{quartiles}",
        mib(row["peak_saved_bytes"]),
        UNKNOWN if row["peak_of_off"] is None else f"{row['peak_of_off']:.2f}",
        mib(row["heap_peak_bytes"]),
        {None: UNKNOWN, True: "equal", False: "differ"}[row["bit_equal"]],
    ]


def table(document: dict[str, Any]) -> Table:
    """Return the table for a terminal."""
    return grouped_table("Training steps", NOTE, HEADINGS, HEADINGS[:2], cells(document))


def draw(document: dict[str, Any], path: Path) -> None:
    """A panel per model: step time over off's against peak bytes of saved tensors."""
    draw_by_model(document["rows"], _panel, path, xlabel="peak bytes of saved tensors (MiB)")


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        method = row["method"]
        if method == MEMCPY:
            label = f"{OFF} + copies, not hidden"
            axes.axhline(1 + row["time_of_off"], color=GREY, ls=":", lw=1.2, label=label)
        elif row["failure"] is None:
            look = {"marker": MARKERS[method], "colour": COLOURS[method]}
            add_point(axes, row, row["peak_saved_bytes"], label=method, **look)
