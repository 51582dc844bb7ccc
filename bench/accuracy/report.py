"""The accuracy experiment as a terminal table, Markdown, pictures and one self-contained page."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from bench.accuracy.summary import GPUS
from bench.drawing import html_page as page

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

COLUMNS: Final = (
    *("model", "policy", "val. loss", "change (95 % CI)", "accuracy %", "change (95 % CI)"),
    *("verdict", "bits", "MiB held", "codecs ms", *(f"swap ms on {gpu}*" for gpu in GPUS)),
)
TERMINAL: Final = (0, 1, 3, 4, 6, 8, 10)
"""Of COLUMNS: those that a terminal has room for."""

NOTE: Final = (
    "Change: paired over matched seeds, against off; interval: Student's t. Verdict: the worst "
    "pair's loss against off's spread over the seeds. MiB held: of all tensors that could be "
    "swapped, in one step. Codecs: measured on this CPU. * Simulated: encode, copies and decode of "
    "a step's tensors with nothing hidden, and the change from raw copies; a codec that the GPU's "
    "profile has no rate for goes at zvc's."
)


def rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row per model and policy, of `COLUMNS`."""
    for row in document["summary"]:
        off = row["policy"] == "off"
        yield (
            row["model"],
            row["policy"],
            number(row["validation_loss"], ".4f"),
            "" if off else change(row["loss"]),
            number(row["accuracy"], ".1f", 100),
            "" if off else change(row["accuracy_change"], "+.1f", 100),
            "" if off else row["loss"]["verdict"],
            "" if off else "equal" if row["bit_equal"] else "differ",
            f"{row['held_bytes'] / 2**20:.1f}",
            "" if off else f"{row['codec_ms']:.1f}",
            *(_latency(row["simulated_swap"].get(gpu)) for gpu in GPUS),
        )


def number(value: float | None, form: str, factor: float = 1) -> str:
    """A figure in words; JSON has null for what is not finite.

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


def table(document: dict[str, Any]) -> Table:
    """For a terminal: the columns that fit."""
    found = Table(*(COLUMNS[i] for i in TERMINAL), title="Accuracy against latency", caption=NOTE)
    for row in rows(document):
        found.add_row(*(row[i] for i in TERMINAL))
    return found


def markdown(document: dict[str, Any]) -> str:
    """The same for README and docs."""
    lines = [" | ".join(COLUMNS), " | ".join("---" for _ in COLUMNS)]
    lines += [" | ".join(row) for row in rows(document)]
    return "\n".join(f"| {line} |" for line in lines) + f"\n\n{NOTE}\n"


def write(document: dict[str, Any], out: Path) -> list[Path]:
    """Write table.md, the pictures and report.html into the folder."""
    from bench.accuracy import pictures

    (out / "table.md").write_text(markdown(document), encoding="utf-8")
    drawn = {}
    for name, draw in pictures.DRAWN.items():
        drawn[name] = out / f"{name}.png"
        draw(document, drawn[name])
    html = out / "report.html"
    html.write_text(_html(document, drawn), encoding="utf-8")
    return [out / "results.json", out / "table.md", *drawn.values(), html]


_SHOWN: Final = {
    "pareto": (
        "What it costs and what it buys",
        "change of accuracy and validation loss against reduction of swap latency",
    ),
    "heat": (
        "Error of gradients by class of module",
        "relative error of gradients by policy and class of module",
    ),
    "curves": ("Training", "training loss by model and policy"),
}
"""Pictures, their headings, and what they show for who does not see them."""


def _html(document: dict[str, Any], pictures: dict[str, Path]) -> str:
    section = page.Section(
        "",
        page.where(document["environment"]),
        [page.Grid(COLUMNS, list(rows(document)), notes=[NOTE])],
        pictures=[page.Picture(*_SHOWN[name], path) for name, path in pictures.items()],
    )
    return page.render("cswap: accuracy against latency", [section])
