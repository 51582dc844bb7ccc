"""The demo's tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.demo.summary import Row

MIB = 1 << 20
UNKNOWN = "-"
TITLE = "Saved tensors: cswap and torch's checkpointing"
WORDS = {
    "remat": "with one line",
    "lossless": "with nothing computed again",
    "int8": "with int8",
    "checkpoint": "by checkpointing",
}
"""Names of modes in a sentence."""

DROPPED = ("diff", "acc.\n%", "ratio", "loss")
"""Columns that a narrow terminal does without, the first to go first."""

CAPTION = (
    'remat: cswap by one line, lossless; int8: with lossy="int8". '
    "peak: most bytes that saved tensors held in a step; x less: than off. ratio: raw / encoded "
    "bytes. time: of a step, off = 1. loss, acc.: validation. bits: loss and all gradients equal "
    "off's, in every step. diff: largest difference of a gradient from off's."
)
HEADINGS = ("peak\nMiB", "x\nless", "ratio", "time", "loss", "acc.\n%", "bits", "diff")


def comparison(rows: Sequence[Row]) -> Table:
    """Return the table of all models and modes."""
    table = Table(title=TITLE, caption=CAPTION, box=box.SIMPLE_HEAD, collapse_padding=True)
    for heading in ("model", "mode"):
        table.add_column(heading, no_wrap=True)
    for heading in HEADINGS:
        table.add_column(heading, justify="right", no_wrap=True)
    for i, row in enumerate(rows):
        last_of_model = i + 1 == len(rows) or rows[i + 1].model != row.model
        table.add_row(row.model, row.mode, *_figures(row), end_section=last_of_model)
    return table


def _figures(row: Row) -> list[str]:
    equal = {None: UNKNOWN, True: "equal", False: "differ"}[row.bit_equal]
    return [
        _number(row.peak_saved_bytes, "{:.1f}", 1 / MIB),
        _number(row.peak_ratio, "{:.2f}"),
        _number(row.ratio, "{:.2f}"),
        _number(row.step_time_rel, "{:.2f}"),
        _number(row.final_loss, "{:.4f}"),
        _number(row.accuracy, "{:.1f}", 100),
        equal,
        "0" if row.max_grad_diff == 0 else _number(row.max_grad_diff, "{:.1e}"),
    ]


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return UNKNOWN if value is None else form.format(value * factor)


def conclusions(rows: Sequence[Row]) -> list[str]:
    """Return a sentence per model: the bytes that each mode saved, and its time."""
    found = []
    for model in dict.fromkeys(row.model for row in rows):
        off = next((row for row in rows if row.model == model and row.mode == "off"), None)
        said = [_said(row) for row in rows if row.model == model and row.mode in WORDS]
        if off is not None and off.peak_saved_bytes and any(said):
            peak = off.peak_saved_bytes / MIB
            said_of = "; ".join(filter(None, said))
            found.append(f"{model.upper()}, {peak:.1f} MiB of saved tensors without: {said_of}.")
    return found


def _said(row: Row) -> str:
    if row.peak_ratio is None or row.step_time_rel is None:
        return ""
    bits = ", every bit equal" if row.bit_equal and row.mode in ("lossless", "remat") else ""
    return (
        f"{WORDS[row.mode]} {row.peak_ratio:.1f} times less{bits}, "
        f"at {row.step_time_rel:.2f} times the time"
    )


def fallback_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each run in which cswap took a slower path after a failure."""
    return [
        f"{row.model}, {row.mode}: {row.fallbacks} times cswap fell back to a slower path; "
        "see fallbacks_by_reason in results.json."
        for row in rows
        if row.fallbacks
    ]
