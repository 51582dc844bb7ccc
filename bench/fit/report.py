"""Memory goals as a table for terminals, as Markdown, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import (
    MIB,
    UNKNOWN,
    add_point,
    draw_by_model,
    grouped_table,
    mib,
)
from bench.fit.measure import CHECKPOINT, FIT, OFF
from cswap.palette import BLACK, BLUE, GREEN, LIGHT

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.table import Table

HEADINGS: Final = (
    *("model", "saved bytes left", "method", "goal MiB", "peak MiB", "held", "step / off's"),
    *("added / checkpoint's", "heap MiB", "bits of off", "how"),
)
NOTE: Final = (
    "A goal is what is resident (parameters, buffers, gradients, optimizer state) plus a share of "
    "the bytes that a step saves without cswap. Peak: resident bytes plus the peak of saved bytes, "
    "by a meter that is not cswap's. Checkpoint: torch.utils.checkpoint on as many of the first "
    "blocks as hold the goal. Steps take turns; step / off's: median of the quotients of like "
    "steps, with quartiles. Added: step / off's less 1. Heap: growth of all memory allocated."
)
COLOURS: Final = {OFF: BLACK, FIT: BLUE, CHECKPOINT: GREEN}
MARKERS: Final = {OFF: "o", FIT: "D", CHECKPOINT: "s"}


def with_quotients(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with fit's added time over checkpointing's at the same goal."""
    times = {(r["model"], r["share"], r["method"]): r["time_of_off"] for r in rows}
    found = []
    for row in rows:
        mine = row["time_of_off"]
        its = times.get((row["model"], row["share"], CHECKPOINT))
        if row["method"] == FIT and mine is not None and its is not None and its > 1:
            row = {**row, "added_of_checkpoint": (mine - 1) / (its - 1)}
        found.append(row)
    return found


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per row, of HEADINGS."""
    return [_line(row) for row in document["rows"]]


def _line(row: dict[str, Any]) -> list[str]:
    time, spread = row["time_of_off"], row["time_of_off_spread"]
    words = {None: UNKNOWN, True: "yes", False: "no"}
    how = row["how"]
    if row["smallest_bytes"] is not None:
        how += f"; smallest {row['smallest_bytes'] / MIB:.1f} MiB"
    added = row["added_of_checkpoint"]
    return [
        row["model"],
        UNKNOWN if row["share"] is None else f"{row['share']:.0%}",
        row["method"],
        mib(row["goal_bytes"]),
        mib(row["peak_bytes"]),
        words[row["held"]],
        UNKNOWN if time is None else f"{time:.2f} [{spread[0]:.2f}, {spread[1]:.2f}]",
        UNKNOWN if added is None else f"{added:.2f}",
        mib(row["heap_bytes"]),
        words[row["bit_equal"]],
        how,
    ]


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    left = ("model", "method", "how")
    return grouped_table("Memory goals", NOTE, HEADINGS, left, cells(document))


def draw(document: dict[str, Any], path: Path) -> None:
    """A panel per model: step time over off's against the peak of memory, and the goals."""
    draw_by_model(document["rows"], _panel, path, xlabel="peak: resident and saved (MiB)")


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        method = row["method"]
        if method == FIT:
            axes.axvline(row["goal_bytes"] / MIB, color=LIGHT, ls=":", lw=1.2, label="goal")
        if row["time_of_off"] is not None:
            look = {"marker": MARKERS[method], "colour": COLOURS[method]}
            add_point(axes, row, row["peak_bytes"], label=method, **look)
