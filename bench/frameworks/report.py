"""Other packages' models in every way, as a table for terminals and as Markdown cells."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import UNKNOWN, grouped_table, mib
from bench.frameworks.measure import PLAIN, WAYS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rich.table import Table

HEADINGS: Final = (
    *("workload", "way", "held MiB", "/ plain's", "peak MiB", "/ plain's", "left MiB", "counted"),
    *("step ms", "/ plain's", "bits"),
)
DROPPED: Final = ("step ms", "bits", "counted", "left MiB")
"""Columns that a narrow terminal does without, the first to go first."""

NOTE: Final = (
    "Held: growth of the allocator's bytes over a forward, all encodes done; median of 3 steps. "
    "Peak: largest growth in a step; left: growth in front of the optimizer; both over the moment "
    "before cswap was installed, so that what it keeps from step to step counts. "
    "Counted: share of the saved bytes, parameters left out, that cswap took off by its own count; "
    "what encoders and pools hold beside it is in held alone. Steps of all ways take turns, in a "
    "random order; / plain's: median of the quotients of like steps, with quartiles. bits: loss "
    "and all gradients beside plain's. cswap: the line without options."
)
WANTED: Final = 0.75
"""Of plain's held bytes: the bar for the line without options."""
LONGEST: Final = 1.10
"""Of plain's step time: the bar for the same line."""
BITS: Final = {True: "equal", False: "differ", None: "plain differs from itself"}
"""Words for `Row.bit_equal`."""
MOST_LETTERS: Final = 60
"""Of a failure in the table; the file has all of it."""


def cells(document: dict[str, Any]) -> Iterator[list[str]]:
    """A row per workload and way, of HEADINGS; one that failed says why under held MiB."""
    for row in document["rows"]:
        yield [row["workload"], row["way"], *_figures(row)]


def _figures(row: dict[str, Any]) -> list[str]:
    if row["failure"] is not None:
        return [row["failure"][:MOST_LETTERS], *[UNKNOWN] * (len(HEADINGS) - 3)]
    spread = row["time_of_plain_spread"]
    quartiles = "" if spread is None else f" [{spread[0]:.2f}, {spread[1]:.2f}]"
    gained = row["gained_of_saved"]
    return [
        mib(row["held_bytes"]),
        _share(row["held_of_plain"]),
        mib(row.get("peak_bytes")),
        _share(row.get("peak_of_plain")),
        mib(row.get("left_bytes")),
        UNKNOWN if gained is None else f"{gained:.0%}",
        f"{1e3 * row['step_s']:.0f}",
        f"{row['time_of_plain']:.2f}{quartiles}",
        BITS[row["bit_equal"]],
    ]


def _share(of_plain: float | None) -> str:
    return UNKNOWN if of_plain is None else f"{of_plain:.2f}"


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    title = "Models of other packages"
    return grouped_table(title, NOTE, HEADINGS, HEADINGS[:3], cells(document))


def summary(document: dict[str, Any]) -> str:
    """On how many workloads the line without options reaches `WANTED`, and `LONGEST`."""
    line = next(way for way in WAYS if way != PLAIN)
    found = [r for r in document["rows"] if r["way"] == line and r["held_of_plain"] is not None]
    less = [row for row in found if row["held_of_plain"] <= WANTED]
    short = [row["workload"] for row in less if row["time_of_plain"] <= LONGEST]
    names = ", ".join(row["workload"] for row in less) or "none"
    peaks = [row["peak_of_plain"] for row in found if row["peak_of_plain"] is not None]
    of_peaks = ""
    if peaks:
        of_peaks = f" The peak of a step is {min(peaks):.2f} to {max(peaks):.2f} of plain's."
    return (
        f"{line} holds at least {1 - WANTED:.0%} less than plain on {len(less)} of {len(found)} "
        f"workloads: {names}. Of these, {len(short)} take at most {LONGEST:.2f} of plain's time: "
        f"{', '.join(short) or 'none'}.{of_peaks}"
    )
