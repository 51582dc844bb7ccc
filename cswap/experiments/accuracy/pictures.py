"""The accuracy experiment's picture: cost in accuracy and loss against the latency saved."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from cswap.experiments.accuracy.summary import GPUS
from cswap.experiments.accuracy.verdict import CONFIDENCE
from cswap.experiments.codecs.plots import front
from cswap.experiments.labels import place
from cswap.palette import BLACK, BLUE, GREY, ORANGE, PURPLE, SKY, VERMILION
from cswap.report.figure import new_figure, png_of

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS: Final = {
    "lossless": BLUE,
    "bf16": SKY,
    "int8": VERMILION,
    "fp8": ORANGE,
    "int4": PURPLE,
}

GPU: Final = GPUS[0]
"""The others change the latencies, but hardly their reduction."""

MARKERS: Final = {"cnn": "o", "resnet": "D", "vit": "s", "gpt": "^"}

ALT: Final = "change of accuracy and validation loss against the swap latency saved"
"""Describes the picture for readers who do not see it."""


def pareto(document: dict[str, Any], path: Path) -> None:
    """Each policy's cost in accuracy and loss against the latency that it saves on a GPU."""
    figure = new_figure(12, 5.4)
    left, right = figure.subplots(1, 2)
    rows = [row for row in document["summary"] if row["policy"] != "off"]
    _points(left, rows, "accuracy_change", 100.0)
    _points(right, rows, "loss", 1.0)
    _margins(right, rows)
    for axes in (left, right):
        axes.set_xlabel(f"swap latency below raw copies, % (simulated, {GPU})")
    left.set_ylabel(f"change of accuracy, points ({CONFIDENCE:.0%} CI)")
    right.set_ylabel(f"change of validation loss, nats ({CONFIDENCE:.0%} CI)")
    _legend(figure, rows)
    path.write_bytes(png_of(figure))


def _legend(figure: Figure, rows: list[dict[str, Any]]) -> None:
    # A colour per policy and a marker per model, not an entry for each pair of them.
    from matplotlib.lines import Line2D

    policies = dict.fromkeys(row["policy"] for row in rows)
    models = dict.fromkeys(row["model"] for row in rows)
    entries = [
        *(Line2D([], [], ls="", marker="D", c=COLOURS.get(p, BLACK), label=p) for p in policies),
        *(Line2D([], [], ls="", marker=MARKERS.get(m, "o"), c=GREY, label=m) for m in models),
    ]
    if entries:
        figure.legend(
            handles=entries, loc="outside lower center", ncols=len(entries), fontsize=8,
            title="lines: policies that no other one of the model beats in both; dotted: each "
            "model's margin", title_fontsize=8,
        )  # fmt: skip


def _points(axes: Axes, rows: list[dict[str, Any]], key: str, factor: float) -> None:
    better = 1.0 if key == "accuracy_change" else -1.0
    by_model: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        found = row[key]
        if found["mean"] is None or not math.isfinite(found["mean"]):
            continue
        x, y = 100 * row["simulated_swap"][GPU]["reduction"], factor * found["mean"]
        by_model.setdefault(row["model"], []).append((x, better * y))
        known = found["low"] is not None
        bars = [[y - factor * found["low"]], [factor * found["high"] - y]] if known else None
        axes.errorbar(
            *(x, y),
            yerr=bars,
            fmt=MARKERS.get(row["model"], "o"),
            color=COLOURS.get(row["policy"], BLACK),
            capsize=3,
            ms=5,
        )
    for points in by_model.values():
        best = front(points)
        axes.plot([p[0] for p in best], [better * p[1] for p in best], color=GREY, lw=0.8)
    axes.axhline(0.0, color=BLACK, lw=0.8)
    axes.grid(alpha=0.3)


def _margins(axes: Axes, rows: list[dict[str, Any]]) -> None:
    # Only within the reach of the points: a wide margin must not press them together.
    low, high = axes.get_ylim()
    right = axes.get_xlim()[1]
    found = {row["model"]: row["margin"] for row in rows if row["margin"] is not None}
    within = {model: margin for model, margin in found.items() if low < margin < high}
    for margin in within.values():
        axes.axhline(margin, color=GREY, lw=0.9, ls=":")
    place(axes, [(right, margin, f"margin of {model}") for model, margin in within.items()])
