"""The tables of the accuracy experiment."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from cswap.experiments.accuracy.summary import GPUS
from cswap.experiments.accuracy.verdict import CONFIDENCE, FEWEST_SEEDS
from cswap.experiments.grid import Grid

if TYPE_CHECKING:
    from collections.abc import Iterator

_CI: Final = f"({100 * CONFIDENCE:.0f} % CI)"
COLUMNS: Final = (
    *("model, seeds", "policy", "val. loss", f"change {_CI}", "margin", "verdict"),
    *("accuracy %", f"change {_CI}", "bits", "MiB held", *(f"swap ms on {g}*" for g in GPUS)),
)
TERMINAL: Final = (0, 1, 5, 10, 9, 3, 4, 6, 8)
"""The columns of COLUMNS for a terminal: first the verdict, the latency and the bytes."""

DROPPED: Final = tuple(COLUMNS[i] for i in (8, 6, 4, 3))
"""Columns that a narrow terminal does without, the first to go first."""

NOTE: Final = (
    "Change: mean paired difference from plain training over matched seeds, with its interval "
    "(Student's t). Margin: the mean loss in nats that would not matter, stated before the runs. "
    "Verdict: equal if the loss's whole interval lies below the margin, worse if it lies above "
    "the margin, else undecided; runs with the same bits are equal. MiB held: encodings of one "
    "step's swappable tensors, and the tensors among them that stay. * Simulated: encode, copies "
    "and decode of one step's tensors, with nothing hidden, and the change from raw copies; a "
    "codec without a rate in the GPU's profile takes the rate of zvc."
)
QUICK: Final = "Quick: a few steps. This run decides nothing; it shows that everything works."
FEW: Final = f"Fewer than {FEWEST_SEEDS} seeds decide nothing: give --seeds {FEWEST_SEEDS} or more."
NO_MARGIN: Final = (
    "No margin was stated for {}: there, only runs with the same bits can be found equal. "
    "`--pilot` measures a margin, `--margin` states it."
)


def notes(document: dict[str, Any]) -> list[str]:
    """Notes for readers of the table, beginning with the limits of this run."""
    settings = document["settings"]
    found = []
    if settings["quick"]:
        found.append(QUICK)
    else:
        if min(settings["seeds"].values()) < FEWEST_SEEDS:
            found.append(FEW)
        if without := [m for m in settings["models"] if m not in settings["margins"]]:
            found.append(NO_MARGIN.format(", ".join(without)))
    return [*found, NOTE]


def rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row per model and policy, of `COLUMNS`."""
    for row in document["summary"]:
        off = row["policy"] == "off"
        margin = None if off else row["margin"]
        yield (
            f"{row['model']}, {row['seeds']}",
            row["policy"],
            number(row["validation_loss"], ".4f"),
            "" if off else change(row["loss"]),
            "" if margin is None else f"{margin:g}",
            "" if off else row["verdict"],
            number(row["accuracy"], ".1f", 100),
            "" if off else change(row["accuracy_change"], "+.1f", 100),
            "" if off else "equal" if row["bit_equal"] else "differ",
            f"{row['held_bytes'] / 2**20:.1f}",
            *(_latency(row["simulated_swap"].get(gpu)) for gpu in GPUS),
        )


SHORT: Final = ("model", "policy", "verdict", "raw / held bytes", f"swap latency on {GPUS[0]}*")


def short_rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row per model and policy, of `SHORT`: the verdict, and the gain in bytes and latency."""
    for row in document["summary"]:
        if row["policy"] != "off":
            gain = row["simulated_swap"][GPUS[0]]["reduction"]
            yield (
                row["model"],
                row["policy"],
                row["verdict"],
                f"{row['eligible_bytes'] / row['held_bytes']:.2f}" if row["held_bytes"] else "",
                f"{-100 * gain:+.0f} %",
            )


def facts(document: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """A row per model: its sizes and data."""
    for model, found in document.get("models", {}).items():
        yield model, ", ".join(f"{key}: {value}" for key, value in found.items())


def number(value: float | None, form: str, factor: float = 1) -> str:
    """A figure in words; JSON has null for a value that is not finite.

    >>> number(0.125, ".1f", 100), number(None, ".1f")
    ('12.5', 'diverged')
    """
    finite = value is not None and math.isfinite(value)
    return format(factor * value, form) if finite and value is not None else "diverged"


def change(found: dict[str, Any], form: str = "+.4f", factor: float = 1) -> str:
    """The mean of a comparison, and its interval where there is one."""
    mean = number(found["mean"], form, factor)
    if found["low"] is None:
        return mean
    return f"{mean} [{number(found['low'], form, factor)}, {number(found['high'], form, factor)}]"


def _latency(simulated: dict[str, float] | None) -> str:
    if simulated is None:
        return ""
    return f"{simulated['ms']:.2f} ({-100 * simulated['reduction']:+.0f} %)"


def table(document: dict[str, Any]) -> Grid:
    """The table for a terminal."""
    headings = [COLUMNS[i] for i in TERMINAL]
    cells = [[row[i] for i in TERMINAL] for row in rows(document)]
    return Grid(headings, cells, "Accuracy against latency", notes(document))


def grids(document: dict[str, Any]) -> list[Grid]:
    """The tables for a page."""
    return [
        Grid(SHORT, list(short_rows(document)), "In short"),
        Grid(COLUMNS, list(rows(document)), "All figures", notes(document)),
        Grid(("model", "sizes and data"), list(facts(document)), "Models"),
    ]
