"""Steps swapped in every way: as a table for terminals, as Markdown, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich import box
from rich.table import Table

from bench.swap.measure import MEMCPY
from bench.workloads.methods import OFF, ON_CPU
from cswap.report.figure import new_figure, png_of

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

MIB: Final = 1 << 20
UNKNOWN: Final = "-"
HEADINGS: Final = (
    *("model", "method", "step ms", "step / off's", "peak saved MiB", "/ off's"),
    *("heap peak MiB", "bits of off"),
)
DROPPED: Final = ("heap peak MiB", "/ off's", "bits of off")
"""Columns that a narrow terminal does without, the first to go first."""

NOTE: Final = (
    "Steps take turns; ms: median with its 20 % and 80 % quantiles; step / off's: median of the "
    "quotients of like steps, with quartiles. Peak saved: most bytes that saved tensors held in a "
    "step, copies included. Heap: growth of all memory allocated. On a CPU the host's memory is "
    "the device's: save_on_cpu makes one copy from host to host, of parameters too, and gives that "
    "to backward; memcpy is the copies alone, there and back, with no step."
)
COLOURS: Final = {
    "off": "#000000",
    "checkpoint": "#009e73",
    "checkpoint + save_on_cpu": "#009e73",
    "save_on_cpu": "#e69f00",
    "TRL OffloadActivations": "#cc79a7",
    "torchtune OffloadActivations": "#cc79a7",
    "cswap raw": "#56b4e9",
    "cswap lossless": "#0072b2",
    "cswap int8": "#d55e00",
}
"""Okabe and Ito's, which colour-blind readers can tell apart; the markers differ, too."""

MARKERS: Final = dict(zip(ON_CPU, "oPsXvv<D^", strict=True))


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A row per model and method, of HEADINGS; one that failed says why under step ms."""
    return [[row["model"], row["method"], *_figures(row)] for row in document["rows"]]


def _figures(row: dict[str, Any]) -> list[str]:
    step, spread = row["step"], row["time_of_off_spread"]
    if step is None:
        return [row["failure"], *[UNKNOWN] * (len(HEADINGS) - 3)]
    ms = [f"{1e3 * step[key]:.1f}" for key in ("median_s", "low_s", "high_s")]
    quartiles = "" if spread is None else f" [{spread[0]:.2f}, {spread[1]:.2f}]"
    return [
        f"{ms[0]} [{ms[1]}, {ms[2]}]",
        UNKNOWN if row["time_of_off"] is None else f"{row['time_of_off']:.2f}{quartiles}",
        _mib(row["peak_saved_bytes"]),
        UNKNOWN if row["peak_of_off"] is None else f"{row['peak_of_off']:.2f}",
        _mib(row["heap_peak_bytes"]),
        {None: UNKNOWN, True: "equal", False: "differ"}[row["bit_equal"]],
    ]


def _mib(nbytes: int | None) -> str:
    return UNKNOWN if nbytes is None else f"{nbytes / MIB:.1f}"


def table(document: dict[str, Any]) -> Table:
    """Return the table for a terminal."""
    found = Table(title="Training steps", caption=NOTE, box=box.SIMPLE_HEAD, collapse_padding=True)
    for heading in HEADINGS:
        found.add_column(heading, justify="left" if heading in HEADINGS[:2] else "right")
    rows = cells(document)
    for i, row in enumerate(rows):
        last_of_model = i + 1 == len(rows) or rows[i + 1][0] != row[0]
        found.add_row(*row, end_section=last_of_model)
    return found


def draw(document: dict[str, Any], path: Path) -> None:
    """A panel per model: step time over off's against peak bytes of saved tensors."""
    models = list(dict.fromkeys(row["model"] for row in document["rows"]))
    n_columns = min(2, len(models))
    n_rows = -(-len(models) // n_columns)
    figure = new_figure(5 * n_columns, 3.6 * n_rows)
    panels = figure.subplots(n_rows, n_columns, squeeze=False).flatten()
    for model, panel in zip(models, panels, strict=False):
        _panel(panel, [row for row in document["rows"] if row["model"] == model])
    for panel in panels[len(models) :]:
        panel.set_visible(False)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=3, fontsize=8)
    path.write_bytes(png_of(figure))


def _panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    for row in rows:
        if row["method"] == MEMCPY:
            limit = 1 + row["time_of_off"]
            axes.axhline(
                limit, color="#999999", ls=":", lw=1.2, label=f"{OFF} + copies, not hidden"
            )
        elif row["failure"] is None:
            low, high = row["time_of_off_spread"] or (row["time_of_off"], row["time_of_off"])
            middle = row["time_of_off"]
            axes.errorbar(
                row["peak_saved_bytes"] / MIB,
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
        xlabel="peak bytes of saved tensors (MiB)",
        ylabel="step time / off's",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)
