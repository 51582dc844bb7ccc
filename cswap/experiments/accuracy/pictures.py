"""The accuracy experiment's pictures: Pareto plots, gradient errors, training losses."""

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
    from collections.abc import Callable
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
NOT_USED: Final = "not used"
"""Cell of the heat map for a policy whose lossy codec took no tensor."""

EXACT: Final = 1e-8
"""Errors are drawn as at least this much, since the colours' scale is logarithmic."""


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


def heat(document: dict[str, Any], path: Path) -> None:
    """Relative error of gradients by policy and class of module, a panel per model."""
    from matplotlib.colors import LogNorm

    found = document["gradient_errors"]
    n = max(1, len(found))
    figure = new_figure(4 * n, 3.4)
    panels = figure.subplots(1, n, squeeze=False)
    for panel, (model, by_policy) in zip(panels[0], found.items(), strict=False):
        kinds, values, words = heat_cells(by_policy)
        if not values:
            continue
        panel.imshow(values, norm=LogNorm(EXACT, 1.0), cmap="cividis", aspect="auto")
        for y, line in enumerate(words):
            for x, word in enumerate(line):
                ink = "w" if values[y][x] < 1e-4 else "k"
                panel.text(x, y, word, ha="center", va="center", fontsize=7, color=ink)
        panel.set(title=model, xticks=range(len(kinds)), yticks=range(len(by_policy)))
        panel.set_xticklabels(kinds, rotation=30, ha="right", fontsize=8)
        panel.set_yticklabels(list(by_policy), fontsize=8)
    figure.suptitle("relative error of gradients, ||g - g_off|| / ||g_off||", fontsize=10)
    path.write_bytes(png_of(figure))


def heat_cells(
    by_policy: dict[str, dict[str, float] | None],
) -> tuple[list[str], list[list[float]], list[list[str]]]:
    """The heat map's columns, and per policy its values and the words in its cells.

    >>> heat_cells({"lossless": {"Linear": 0.0}, "int8": {"Linear": 0.013}, "int4": None})
    (['Linear'], [[1e-08], [0.013], [nan]], [['0'], ['1.3e-02'], ['not used']])
    """
    kinds = sorted({kind for errors in by_policy.values() if errors for kind in errors})
    values, words = [], []
    for errors in by_policy.values():
        if errors is None:
            values.append([math.nan] * len(kinds))
            words.append([NOT_USED] * len(kinds))
        else:
            line = [max(errors.get(kind, 0.0), EXACT) for kind in kinds]
            values.append(line)
            words.append(["0" if value <= EXACT else f"{value:.1e}" for value in line])
    return kinds, values, words


def curves(document: dict[str, Any], path: Path) -> None:
    """Training losses of the first seed."""
    models = document["settings"]["models"]
    figure = new_figure(4 * len(models), 3.4)
    panels = figure.subplots(1, len(models), squeeze=False)
    for panel, model in zip(panels[0], models, strict=True):
        for run in document["runs"]:
            if run["model"] == model and run["seed"] == 0:
                colour = COLOURS.get(run["policy"], GREY)
                width = 3.5 if run["policy"] == "off" else 1.2
                panel.plot(run["losses"], color=colour, lw=width, label=run["policy"])
        panel.set(title=model, xlabel="training step", ylabel="cross entropy, nats")
        panel.grid(alpha=0.3)
    if panels[0][0].lines:  # an interrupted experiment may have no run yet
        panels[0][0].legend(fontsize=7)
    path.write_bytes(png_of(figure))


DRAWN: Final[dict[str, tuple[Callable[[dict[str, Any], Path], None], str]]] = {
    "pareto": (pareto, "change of accuracy and validation loss against the swap latency saved"),
    "heat": (heat, "relative error of gradients by policy and class of module"),
    "curves": (curves, "training loss by model and policy"),
}
"""Function that draws each picture, and a description for readers who do not see it, by name."""


def draw(document: dict[str, Any], folder: Path) -> list[Path]:
    """Write the pictures; returns their paths."""
    paths = [folder / f"{name}.png" for name in DRAWN]
    for path, (paint, _) in zip(paths, DRAWN.values(), strict=True):
        paint(document, path)
    return paths
