"""The accuracy experiment's pictures: Pareto plots, gradient errors, training losses."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any, Final

from bench.accuracy.summary import GPUS
from bench.codecs.plots import front
from cswap.report.figure import new_figure, png_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from matplotlib.axes import Axes

COLOURS: Final = {
    "lossless": "#0072b2",
    "bf16": "#56b4e9",
    "int8": "#009e73",
    "fp8": "#e69f00",
    "int4": "#d55e00",
}
"""Okabe and Ito's, which colour-blind readers can tell apart."""

GPU: Final = GPUS[0]
"""The others change the latencies, but hardly their reduction."""

MARKERS: Final = {"cnn": "o", "vit": "s", "gpt": "^"}
MOST_SPREAD: Final = 3
"""Off's spread over the seeds is drawn if it is at most so many times what the policies change."""


def pareto(document: dict[str, Any], path: Path) -> None:
    """What a policy costs in accuracy and loss, and buys in latency on a simulated GPU."""
    figure = new_figure(12, 5.4)
    left, right = figure.subplots(1, 2)
    _points(left, document["summary"], "accuracy_change", 100.0)
    _points(right, document["summary"], "loss", 1.0)
    for axes in (left, right):
        axes.set_xlabel(f"swap latency below raw copies, % (simulated, {GPU})")
    left.set_ylabel("change of accuracy, points (95 % CI)")
    right.set_ylabel("change of validation loss, nats (95 % CI)")
    handles, labels = left.get_legend_handles_labels()
    if handles:
        figure.legend(
            handles, labels, loc="outside lower center", ncols=6, fontsize=8,
            title="lines: policies that no other one of the model beats in both; dotted: off's "
            "spread over the seeds", title_fontsize=8,
        )  # fmt: skip
    path.write_bytes(png_of(figure))


def _points(axes: Axes, rows: list[dict[str, Any]], key: str, factor: float) -> None:
    better = 1.0 if key == "accuracy_change" else -1.0
    by_model: dict[str, list[tuple[float, float]]] = {}
    for row in rows:
        simulated, found = row["simulated_swap"].get(GPU), row[key]
        if simulated is None or found["mean"] is None or not math.isfinite(found["mean"]):
            continue
        x, y = 100 * simulated["reduction"], factor * found["mean"]
        by_model.setdefault(row["model"], []).append((x, better * y))
        known = found["low"] is not None
        bars = [[y - factor * found["low"]], [factor * found["high"] - y]] if known else None
        axes.errorbar(
            *(x, y),
            yerr=bars,
            fmt=MARKERS.get(row["model"], "o"),
            color=COLOURS.get(row["policy"], "black"),
            capsize=3,
            ms=5,
            label=f"{row['model']} {row['policy']}",
        )
    for points in by_model.values():
        best = front(points)
        axes.plot([p[0] for p in best], [better * p[1] for p in best], color="#999999", lw=0.8)
    axes.axhline(0.0, color="black", lw=0.8)
    largest = max(map(abs, axes.get_ylim()))
    for row in rows:
        spread = factor * (row[key]["spread"] or 0.0)
        if row["policy"] == "off" and 0 < spread <= MOST_SPREAD * largest:
            axes.axhline(-better * spread, color="#999999", lw=0.9, ls=":")
    axes.grid(alpha=0.3)


def heat(document: dict[str, Any], path: Path) -> None:
    """Relative error of gradients by policy and class of module, a panel per model."""
    from matplotlib.colors import LogNorm

    found = document["gradient_errors"]
    n = max(1, len(found))
    figure = new_figure(4 * n, 3.4)
    panels = figure.subplots(1, n, squeeze=False)
    for panel, (model, by_policy) in zip(panels[0], found.items(), strict=False):
        kinds = sorted({kind for errors in by_policy.values() for kind in errors})
        values = [[max(errors.get(k, 0.0), 1e-8) for k in kinds] for errors in by_policy.values()]
        if not values:
            continue
        panel.imshow(values, norm=LogNorm(1e-8, 1.0), cmap="cividis", aspect="auto")
        for y, line in enumerate(values):
            for x, value in enumerate(line):
                text = "0" if value <= 1e-8 else f"{value:.1e}"
                ink = "w" if value < 1e-4 else "k"
                panel.text(x, y, text, ha="center", va="center", fontsize=7, color=ink)
        panel.set(title=model, xticks=range(len(kinds)), yticks=range(len(by_policy)))
        panel.set_xticklabels(kinds, rotation=30, ha="right", fontsize=8)
        panel.set_yticklabels(list(by_policy), fontsize=8)
    figure.suptitle("relative error of gradients, ||g - g_off|| / ||g_off||", fontsize=10)
    path.write_bytes(png_of(figure))


def curves(document: dict[str, Any], path: Path) -> None:
    """Training losses of the first seed."""
    models = document["settings"]["models"]
    figure = new_figure(4 * len(models), 3.4)
    panels = figure.subplots(1, len(models), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for run in document["runs"]:
            if run["model"] == model and run["seed"] == 0:
                colour = COLOURS.get(run["policy"], "#999999")
                width = 3.5 if run["policy"] == "off" else 1.2
                panel.plot(run["losses"], color=colour, lw=width, label=run["policy"])
        panel.set(title=model, xlabel="training step", ylabel="cross entropy, nats")
        panel.grid(alpha=0.3)
    panels[0][0].legend(fontsize=7)
    path.write_bytes(png_of(figure))


DRAWN: Final[dict[str, Callable[[dict[str, Any], Path], None]]] = {
    "pareto": pareto,
    "heat": heat,
    "curves": curves,
}
"""Name of the file to what draws it."""
