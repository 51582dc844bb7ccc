"""The papers' figures as a table, as Markdown and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from cswap.palette import BLUE, GREY, LIGHT, VERMILION
from cswap.report.figure import new_figure, png_of

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

COLOURS: Final = {"vDNN": GREY, "published": VERMILION, "ours": BLUE}
"""Markers differ, too."""

SHORT: Final = {
    "alexnet": "AlexNet",
    "vgg16": "VGG-16",
    "plain20": "Plain-20",
    "mobilenet": "MobileNet",
    "resnet50": "ResNet",
    "squeezenet1.0": "SqueezeNet",
}


HEADINGS: Final = (
    *("system", "quantity", "published", "published as", "ours", "ours is", "fitted to a paper"),
    *("protocol", "why they differ"),
)
"""Headings of the Markdown table."""

ORDER: Final = ("vDNN", "CSwap+ means", "CSwap+", "HOME means", "HOME")
"""Order of the systems in the table; means and maxima come before the networks."""

OF_NETWORKS: Final = ("gain", "absolute")
"""Kinds of CSwap+'s rows that have a table of their own."""


def figure(value: float | None, unit: str) -> str:
    """A figure with its unit; a dash if there is none.

    >>> figure(28.04, "GB"), figure(-0.123, "rho"), figure(None, "%")
    ('28.0 GB', '-0.12', '-')
    """
    if value is None:
        return "-"
    digits = {"x": 2, "%": 1, "GB": 1, "GiB": 1, "batch": 0, "samples/s": 0}.get(unit, 2)
    if unit == "samples/s" and abs(value) < 100:
        digits = 1
    text = f"{value:.{digits}f}"
    return text if unit in ("batch", "rho") else f"{text} {unit}"


def table(rows: Sequence[dict[str, Any]]) -> Table:
    """Return the table for the terminal."""
    found = Table(title="Published, and ours")
    for heading in ("system", "quantity", "published", "as", "ours", "is"):
        found.add_column(heading)
    for row in rows:
        found.add_row(
            row["system"],
            row["what"],
            figure(row["published"], row["unit"]),
            row["published_is"],
            figure(row["ours"], row["unit"]),
            row["ours_is"],
        )
    return found


def summary(document: dict[str, Any]) -> list[list[str]]:
    """Markdown rows, of `HEADINGS`, of all but the networks of CSwap+."""
    rows = [row for cell in document["cells"].values() for row in cell]
    shown = [
        row
        for row in (*document["means"], *rows)
        if not (row["system"] == "CSwap+" and row["details"].get("kind") in OF_NETWORKS)
    ]
    return [
        [
            row["system"].removesuffix(" means"),
            row["what"],
            figure(row["published"], row["unit"]),
            row["published_is"],
            figure(row["ours"], row["unit"]),
            row["ours_is"],
            row["fitted"] or "no",
            row["protocol"],
            row["why"],
        ]
        for row in sorted(shown, key=lambda row: ORDER.index(row["system"]))
    ]


def networks(document: dict[str, Any]) -> list[list[str]]:
    """Markdown rows of CSwap+, network by network."""
    found = []
    for cell in document["cells"].values():
        gain = next((r for r in cell if r["details"].get("kind") == "gain"), None)
        if gain is None:
            continue
        d = gain["details"]
        per_s = next(r for r in cell if r["details"].get("kind") == "absolute")
        found.append(
            [
                f"{SHORT[d['model']]} {d['activation']}",
                f"{d['dataset']}, {d['gpu']}",
                figure(per_s["published"], "samples/s"),
                figure(per_s["ours"], "samples/s"),
                figure(gain["published"], "x"),
                figure(gain["ours"], "x"),
                figure(d["sc_over_vdnn"], "x"),
                figure(d["published_oracle_over_vdnn"] if d["activation"] == "relu" else None, "x"),
                figure(d["oracle_over_vdnn"], "x"),
                figure(d["over_vdnn_if_copies_queue"], "x"),
                f"{d['swap_latency_cut']:.0%}",
            ]
        )
    return found


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Write the picture: CSwap+ against vDNN, published and ours, per network and machine."""
    gains = [r for r in rows if r["details"].get("kind") == "gain"]
    if not gains:
        return
    activations = [
        a for a in ("relu", "leaky") if any(r["details"]["activation"] == a for r in gains)
    ]
    drawing = new_figure(12, 4 * len(activations))
    axes = drawing.subplots(len(activations), 1, squeeze=False)[:, 0]
    for axis, activation in zip(axes, activations, strict=True):
        _panel(axis, [r for r in gains if r["details"]["activation"] == activation], activation)
    path.write_bytes(png_of(drawing))


def _panel(axes: Axes, rows: Sequence[dict[str, Any]], activation: str) -> None:
    places = range(len(rows))
    axes.axhline(1, color=COLOURS["vDNN"], lw=1.5, label="vDNN")
    for key, marker in (("published", "o"), ("ours", "D")):
        label = key if key == "published" else "ours, simulated"
        axes.plot(places, [r[key] for r in rows], marker, color=COLOURS[key], label=label, ms=7)
    for place, row in zip(places, rows, strict=True):
        axes.plot([place] * 2, [row["published"], row["ours"]], color=LIGHT, lw=1, zorder=0)
    labels = [
        f"{SHORT[r['details']['model']]}, {r['details']['dataset']}, {r['details']['gpu']}"
        for r in rows
    ]
    axes.set_xticks(list(places), labels, fontsize=8, rotation=40, ha="right")
    kind = "ReLU, lossless (ZVC)" if activation == "relu" else "LeakyReLU, ZFP sliding down"
    axes.set(title=f"CSwap+ with {kind}", ylabel="throughput / vDNN's (x)")
    axes.legend(fontsize=8)
    axes.grid(axis="y", alpha=0.3)
