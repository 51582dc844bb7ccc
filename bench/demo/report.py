"""The demo's rows as a table, for terminals and pages, and in a sentence per model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import MIB, grouped_table

if TYPE_CHECKING:
    from rich.table import Table

HEADINGS: Final = (
    *("model", "mode", "peak saved MiB", "raw / encoded", "step / off's", "val. loss"),
    *("accuracy %", "bits of off", "largest gradient difference"),
)
DROPPED: Final = ("largest gradient difference", "accuracy %", "raw / encoded", "val. loss")
"""Columns that a narrow terminal does without, the first to go first."""

NOTE: Final = (
    "remat: cswap by one line, lossless; lossless: with nothing computed again; int8: with "
    'lossy="int8". Peak saved: most bytes that saved tensors held in a step. raw / encoded: of the '
    "model's saved tensors, those that stay included. Steps take turns; step / off's: median of "
    "the quotients of like steps. Bits: loss and all gradients, in every step."
)
WORDS: Final = {
    "remat": "with one line",
    "lossless": "with nothing computed again",
    "int8": "with int8",
    "checkpoint": "by checkpointing",
}
"""Names of modes in a sentence."""


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per row, of HEADINGS."""
    return [
        [
            r["model"],
            r["method"],
            f"{r['peak_saved_bytes'] / MIB:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['time_of_off']:.2f}",
            f"{r['final_loss']:.4f}",
            f"{100 * r['accuracy']:.1f}",
            "equal" if r["bit_equal"] else "differ",
            f"{r['max_grad_diff']:.1e}",
        ]
        for r in document["rows"]
    ]


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    title = "Saved tensors: cswap and torch's checkpointing"
    return grouped_table(title, NOTE, HEADINGS, HEADINGS[:2], cells(document))


def conclusions(rows: list[dict[str, Any]]) -> list[str]:
    """A sentence per model: the bytes that each mode saved, and its time."""
    found = []
    for model in dict.fromkeys(row["model"] for row in rows):
        mine = {row["method"]: row for row in rows if row["model"] == model}
        said = "; ".join(_said(mine[mode], words) for mode, words in WORDS.items() if mode in mine)
        if said:
            peak = mine["off"]["peak_saved_bytes"] / MIB
            found.append(f"{model.upper()}, {peak:.1f} MiB of saved tensors without: {said}.")
    return found


def _said(row: dict[str, Any], words: str) -> str:
    exact = row["bit_equal"] and row["method"] in ("lossless", "remat")
    bits = ", every bit equal" if exact else ""
    return (
        f"{words} {1 / row['peak_of_off']:.1f} times less{bits}, "
        f"at {row['time_of_off']:.2f} times the time"
    )
