"""The advisor's benchmark as tables and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rich.table import Table

from cswap.palette import BLACK, BLUE, GREEN, GREY, VERMILION
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

COLOURS = {
    "advisor": BLUE,
    "best static codec": GREEN,
    "CSwap+ rule": VERMILION,
    "raw": GREY,
}

KEYS = {
    "advisor": "advisor_s",
    "best static codec": "best_static_s",
    "CSwap+ rule": "cswap_plus_s",
    "raw": "raw_s",
}


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Return the tables for a terminal."""
    table = Table(title="Cost of a step over the oracle's (* simulated)")
    for column in ("model", "machine", "mode", "oracle ms", *KEYS, "which static"):
        table.add_column(column)
    for row in result["cells"]:
        table.add_row(
            row["model"] + " (unseen)" * row["unseen"],
            row["machine"] + " *" * row["simulated"],
            row["mode"],
            f"{1e3 * row['oracle_s']:.3f}",
            *(f"{row[key] / row['oracle_s']:.3f}" for key in KEYS.values()),
            row["best_static"],
        )
    yield table
    table = Table(title="Predicted against true ratio: absolute relative error")
    for column in ("codec", "median", "largest", "tensors"):
        table.add_column(column)
    for codec, found in result["prediction"].items():
        share = (f"{found[key]:.1%}" for key in ("median", "largest"))
        table.add_row(codec, *share, f"{found['tensors']:.0f}")
    yield table
    table = Table(title="Training on this CPU: auto against every codec forced")
    for column in ("model", "codec", "cost ms", "codecs ms", "hooks ms", "peak MiB", "step ms"):
        table.add_column(column)
    for model, rows in result["training"].items():
        for codec, found in rows.items():
            times = (f"{1e3 * found[key]:.2f}" for key in ("cost_s", "device_s", "hooks_s"))
            peak = f"{found['peak_bytes'] / 2**20:.1f}"
            table.add_row(model, codec, *times, peak, f"{found['step_ms']:.1f}")
    yield table


def draw(cells: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of cost over the oracle's, a panel per machine."""
    machines = list(dict.fromkeys(row["machine"] for row in cells))
    figure = new_figure(9, 2.3 * len(machines))
    axes = figure.subplots(len(machines), 1, squeeze=False)
    for machine, (panel,) in zip(machines, axes, strict=True):
        rows = [row for row in cells if row["machine"] == machine]
        for i, (label, key) in enumerate(KEYS.items()):
            heights = [row[key] / row["oracle_s"] for row in rows]
            places = [at + 0.2 * (i - 1.5) for at in range(len(rows))]
            panel.bar(places, heights, 0.2, color=COLOURS[label], label=label)
        panel.axhline(1.0, color=BLACK, lw=0.8)
        panel.set(
            title=machine + (" (simulated)" if rows[0]["simulated"] else ""),
            ylabel="cost / oracle's",
            yscale="log",
            xticks=range(len(rows)),
            xticklabels=[f"{row['model']}\n{row['mode']}" for row in rows],
        )
        plain_ticks(panel.yaxis)
    handles, labels = axes[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    path.write_bytes(png_of(figure))
