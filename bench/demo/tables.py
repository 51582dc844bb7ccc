"""The demo's tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich import box
from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.demo.summary import Row

MIB = 1 << 20
UNKNOWN = "-"
TITLE = "Saved tensors: cswap's three modes and torch's checkpointing"
CAPTION = (
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


def spread_line(model: str, spread: dict[str, Any]) -> str:
    """Return one line on the effect of int8, and of the seed, on the validation loss."""
    verdict = "below" if spread["int8_within_spread"] else "NOT below"
    return (
        f"{model}: int8 moved the validation loss by at most {spread['max_abs_difference']:.4f}, "
        f"{verdict} the spread of {len(spread['seeds'])} seeds without cswap, "
        f"{spread['spread']:.4f}."
    )


def heap_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line per model on all memory that malloc allocated in one step."""
    peaks: dict[str, list[str]] = {}
    for row in rows:
        if row.heap_peak_bytes is not None:
            text = f"{row.mode} {row.heap_peak_bytes / MIB:.1f}"
            peaks.setdefault(row.model, []).append(text)
    return [
        f"{model}: all memory allocated at the peak of a step (MiB): {', '.join(modes)}."
        for model, modes in peaks.items()
    ]


def fallback_lines(rows: Sequence[Row]) -> list[str]:
    """Return a line for each run in which cswap took a slower path after a failure."""
    return [
        f"{row.model}, {row.mode}: {row.fallbacks} times cswap fell back to a slower path; "
        "see fallbacks_by_reason in results.json."
        for row in rows
        if row.fallbacks
    ]
