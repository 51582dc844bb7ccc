"""The demo's tables for a terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.results import Row

MIB = 1 << 20
UNKNOWN = "-"
TITLE = "What autograd saves: cswap off, lossless and int8, and torch's checkpointing"
CAPTION = (
    "peak: most bytes that saved tensors held in a step. ratio: off's peak / this peak. time: of a "
    "step, off = 1. loss, acc.: validation. bits: loss and gradients equal off's bit by bit, in "
    "every step. diff: largest difference of a gradient from off's."
)
HEADINGS = ("peak\nMiB", "ratio", "time", "loss", "acc.\n%", "bits", "diff")


def comparison(rows: Sequence[Row]) -> Table:
    """Return the table of all models and modes."""
    table = Table(title=TITLE, caption=CAPTION)
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
        _number(row.ratio, "{:.2f}"),
        _number(row.step_time_rel, "{:.2f}"),
        _number(row.final_loss, "{:.4f}"),
        _number(row.accuracy, "{:.1f}", 100),
        equal,
        _number(row.max_grad_diff, "{:.1e}"),
    ]


def _number(value: float | None, form: str, factor: float = 1) -> str:
    return UNKNOWN if value is None else form.format(value * factor)


def spread_line(model: str, spread: dict[str, Any]) -> str:
    """Say in one line what int8 and what the seed did to the validation loss."""
    verdict = "below" if spread["int8_within_spread"] else "NOT below"
    return (
        f"{model}: int8 moved the validation loss by at most {spread['max_abs_difference']:.4f}, "
        f"{verdict} the spread of {len(spread['seeds'])} seeds without cswap, "
        f"{spread['spread']:.4f}."
    )
