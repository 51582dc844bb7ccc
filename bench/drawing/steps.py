"""Rows of training steps, grouped by model: a table for terminals, and a panel per model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

from cswap.palette import BLACK
from cswap.report.figure import new_figure, png_of
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

MIB: Final = 1 << 20
UNKNOWN: Final = "-"


def mib(nbytes: int | None) -> str:
    """MiB with one digit; UNKNOWN for None."""
    return UNKNOWN if nbytes is None else f"{nbytes / MIB:.1f}"


def grouped_table(
    title: str, note: str, headings: Sequence[str], left: Sequence[str], lines: Iterable[list[str]]
) -> Table:
    """For a terminal, with a rule between the groups of lines that begin with the same cell.

    Args:
        title: above the table.
        note: below it.
        headings: one per column.
        left: headings of the columns that are aligned left.
        lines: the cells, by line.
    """
    found = Table(title=title, caption=note, box=box.SIMPLE_HEAD, collapse_padding=True)
    for heading in headings:
        found.add_column(heading, justify="left" if heading in left else "right")
    all_lines = list(lines)
    for i, line in enumerate(all_lines):
        last_of_group = i + 1 == len(all_lines) or all_lines[i + 1][0] != line[0]
        found.add_row(*map(literal, line), end_section=last_of_group)
    return found


def draw_by_model(
    rows: Sequence[dict[str, Any]],
    panel: Callable[[Axes, list[dict[str, Any]]], object],
    path: Path,
    *,
    xlabel: str,
) -> None:
    """Write a picture: a panel per model of step time over off's against memory in MiB.

    Args:
        rows: of all models, each with its ``model``.
        panel: draws the points of one model's rows, with labels for the legend.
        path: of the PNG.
        xlabel: label of the horizontal axis.
    """
    models = list(dict.fromkeys(row["model"] for row in rows))
    n_columns = min(2, len(models))
    n_rows = -(-len(models) // n_columns)
    figure = new_figure(5 * n_columns, 3.6 * n_rows)
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for model, axes in zip(models, panels, strict=False):
        panel(axes, [row for row in rows if row["model"] == model])
        axes.axhline(1.0, color=BLACK, lw=0.6)
        axes.set(title=model, xlabel=xlabel, ylabel="step time / off's", xlim=(0, None))
        axes.grid(alpha=0.3)
    for axes in panels[len(models) :]:
        axes.set_visible(False)
    labels = _legend(panels)
    figure.legend(
        list(labels.values()), list(labels), loc="outside lower center", ncols=4, fontsize=8
    )
    path.write_bytes(png_of(figure))


def _legend(panels: Iterable[Axes]) -> dict[str, Any]:
    # A way that failed for the first model still has an entry from another one.
    found: dict[str, Any] = {}
    for axes in panels:
        handles, labels = axes.get_legend_handles_labels()
        found |= dict(zip(labels, handles, strict=True))
    return found


def add_point(
    axes: Axes, row: dict[str, Any], nbytes: int, *, marker: str, colour: str, label: str
) -> None:
    """Draw a row's step time over off's, with its quartiles, against a number of bytes."""
    middle = row["time_of_off"]
    low, high = row["time_of_off_spread"] or (middle, middle)
    axes.errorbar(
        nbytes / MIB,
        middle,
        yerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
        fmt=marker,
        color=colour,
        capsize=3,
        label=label,
    )
