"""Compiled models in every way, as a table for terminals and as Markdown cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import grouped_table, mib

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS: Final = (
    *("model", "way", "saved MiB", "/ plain's", "step ms", "/ plain's time", "gradient error"),
)
NOTE: Final = (
    "By torch.compile (Inductor). Saved: tensors that the compiled graphs hold for backward, "
    "parameters left out; of the hooks between graphs, by cswap's count after the forward. Step: "
    "forward and backward; the ways take turns; / plain's time: median of the quotients of like "
    "steps, with quartiles. Gradient error: the largest relative one of a parameter, by its norm."
)


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per row, of HEADINGS."""
    return [_line(row) for row in document["rows"]]


def _line(row: dict[str, Any]) -> list[str]:
    low, high = row["time_of_plain_spread"]
    return [
        row["model"],
        row["way"],
        mib(row["saved_bytes"]),
        f"{row['saved_of_plain']:.2f}",
        f"{1e3 * row['step_s']:.0f}",
        f"{row['time_of_plain']:.2f} [{low:.2f}, {high:.2f}]",
        f"{row['gradient_error']:.1e}" if row["gradient_error"] else "0",
    ]


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    return grouped_table("Compiled models", NOTE, HEADINGS, HEADINGS[:2], cells(document))
