"""Memory goals as a table for terminals, as Markdown, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

from bench.fit.measure import CHECKPOINT, FIT, OFF
from cswap.report.figure import new_figure, png_of

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

MIB: Final = 1 << 20
UNKNOWN: Final = "-"
HEADINGS: Final = (
    *("model", "saved bytes left", "method", "goal MiB", "peak MiB", "held", "step / off's"),
    *("added / checkpoint's", "heap MiB", "bits of off", "how"),
)
NOTE: Final = (
    "A goal is what is resident (parameters, buffers, gradients, optimizer state) plus a share of "
    "the bytes that a step saves without cswap. Peak: resident bytes plus the peak of saved bytes, "
    "by a meter that is not cswap's. Checkpoint: torch.utils.checkpoint on as many of the first "
    "blocks as hold the goal. Steps take turns; step / off's: median of the quotients of like "
    "steps, with quartiles. Added: step / off's less 1. Heap: growth of all memory allocated."
)
COLOURS: Final = {OFF: "#000000", FIT: "#0072b2", CHECKPOINT: "#009e73"}
MARKERS: Final = {OFF: "o", FIT: "D", CHECKPOINT: "s"}


def with_quotients(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, with the time that fit adds over what checkpointing adds at the same goal."""
    times = {(r["model"], r["share"], r["method"]): r["time_of_off"] for r in rows}
    found = []
    for row in rows:
        mine = row["time_of_off"]
        its = times.get((row["model"], row["share"], CHECKPOINT))
        if row["method"] == FIT and mine is not None and its is not None and its > 1:
            row = {**row, "added_of_checkpoint": (mine - 1) / (its - 1)}
        found.append(row)
    return found


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per row, of HEADINGS."""
    return [_line(row) for row in document["rows"]]


def _line(row: dict[str, Any]) -> list[str]:
    time, spread = row["time_of_off"], row["time_of_off_spread"]
    words = {None: UNKNOWN, True: "yes", False: "no"}
    how = row["how"]
    if row["smallest_bytes"] is not None:
        how += f"; smallest {row['smallest_bytes'] / MIB:.1f} MiB"
    added = row["added_of_checkpoint"]
    return [
        row["model"],
        UNKNOWN if row["share"] is None else f"{row['share']:.0%}",
        row["method"],
        _mib(row["goal_bytes"]),
        _mib(row["peak_bytes"]),
        words[row["held"]],
        UNKNOWN if time is None else f"{time:.2f} [{spread[0]:.2f}, {spread[1]:.2f}]",
        UNKNOWN if added is None else f"{added:.2f}",
        _mib(row["heap_bytes"]),
        words[row["bit_equal"]],
        how,
    ]


def _mib(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{nbytes / MIB:.1f}"


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    found = Table(title="Memory goals", caption=NOTE, box=box.SIMPLE_HEAD, collapse_padding=True)
    for heading in HEADINGS:
        left = heading in ("model", "method", "how")
        found.add_column(heading, justify="left" if left else "right")
    lines = cells(document)
    for i, line in enumerate(lines):
        last_of_model = i + 1 == len(lines) or lines[i + 1][0] != line[0]
        found.add_row(*line, end_section=last_of_model)
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    """A panel per model: step time over off's against the peak of memory, and the goals."""
    models = list(dict.fromkeys(row["model"] for row in document["rows"]))
    figure = new_figure(4.2 * min(2, len(models)), 3.4 * -(-len(models) // 2))
    panels = figure.subplots(-(-len(models) // 2), min(2, len(models)), squeeze=False).flatten()
    for model, panel in zip(models, panels, strict=False):
        _panel(panel, [row for row in document["rows"] if row["model"] == model])
    for panel in panels[len(models) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    unique = dict(zip(labels, handles, strict=True))
    figure.legend(
        list(unique.values()), list(unique), loc="outside lower center", ncols=4, fontsize=8
    )
    path.write_bytes(png_of(figure))


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["method"] == FIT:
            axes.axvline(row["goal_bytes"] / MIB, color="#bbbbbb", ls=":", lw=1.2, label="goal")
        if row["time_of_off"] is None:
            continue
        low, high = row["time_of_off_spread"]
        middle = row["time_of_off"]
        axes.errorbar(
            row["peak_bytes"] / MIB,
            middle,
            yerr=[[max(0.0, middle - low)], [max(0.0, high - middle)]],
            fmt=MARKERS[row["method"]],
            color=COLOURS[row["method"]],
            capsize=3,
            label=row["method"],
        )
    axes.axhline(1.0, color="black", lw=0.6)
    axes.set(
        title=rows[0]["model"],
        xlabel="peak: resident and saved (MiB)",
        ylabel="step time / off's",
        xlim=(0, None),
    )
    axes.grid(alpha=0.3)
