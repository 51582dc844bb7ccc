"""Ways alone in their processes, as a table for terminals and as Markdown cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import UNKNOWN, grouped_table, mib

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS: Final = (
    *("model", "way", "step ms", "step / off's", "fresh pages a step"),
    *("process grew by MiB", "losses of off"),
)
DROPPED: Final = ("step ms", "losses of off")
"""Columns that a narrow terminal does without, the first to go first."""

NOTE: Final = (
    "Each way trains alone in a process of its own; the processes take turns, a step each. step / "
    "off's: median of the quotients of like steps, with quartiles. Fresh pages: 4 KiB each, that "
    "the system filled with zeros (minor page faults). Grew: the process's own memory (resident, "
    "not shared) at its peak in settled steps, over that before its first step: gradients and "
    "optimizer state are in it. All processes have loaded cswap's kernels before. Malloc left "
    "alone: glibc gives freed memory back to the system as it does by itself."
)


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per row, of HEADINGS."""
    return [_line(row) for row in document["rows"]]


def _line(row: dict[str, Any]) -> list[str]:
    low, high = row["time_of_off_spread"]
    return [
        row["model"],
        row["way"],
        f"{1e3 * row['step']['median_s']:.1f}",
        f"{row['time_of_off']:.2f} [{low:.2f}, {high:.2f}]",
        UNKNOWN if row["pages"] is None else f"{row['pages']:.0f}",
        mib(row["growth_bytes"]),
        "equal" if row["same_losses"] else "differ",
    ]


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    return grouped_table("Alone in a process", NOTE, HEADINGS, HEADINGS[:2], cells(document))
