"""Pictures of the codecs' benchmark: ratio against rate, rates by size, sweeps over sparsity.

All from the result file. Every codec has a marker of its own.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cswap.experiments.codecs.plots import pareto, write
from cswap.experiments.codecs.totals import Total, by_data_set
from cswap.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from cswap.report.figure import new_figure
from cswap.report.log_axis import plain_ticks
from cswap.units import show_bytes

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    Rows = list[dict[str, Any]]

STYLES: Final = {
    "zvc": (BLUE, "o"),
    "csr": (VERMILION, "s"),
    "rle": (GREEN, "^"),
    "zvc+expk": (PURPLE, "v"),
    "lz4": (ORANGE, "D"),
    "int8": (VERMILION, "s"),
    "bitpack": (GREEN, "^"),
    "raw": (SKY, "D"),
    "memcpy": (BLACK, "x"),
}
"""Colour and marker of codecs that are drawn as lines."""

PARETO_DATA: Final = ("relu", "gelu", "softmax", "gradient", "mask", "token")

QUANTITIES: Final = ("ratio", "encode", "decode")
LABELS: Final = {
    "ratio": "raw / encoded bytes",
    "encode": "encode, GB/s of raw bytes",
    "decode": "decode, GB/s of raw bytes",
}


def draw(document: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write the pictures that the rows suffice for, as ``<stem>-<name>.png``.

    Args:
        document: the result file's content.
        folder: folder of the pictures.
        stem: stem of the result file's name.

    Returns:
        The written paths.
    """
    figures = {
        "pareto": pareto(_recorded_groups(document["rows"])),
        "sizes": _sizes(document["rows"]),
        **{f"sparsity-{dtype}": _sparsity(document, dtype) for dtype in ("float32", "bfloat16")},
    }
    return write(figures, folder, stem)


def _recorded_groups(rows: Rows) -> dict[str, list[Total]]:
    found = by_data_set([r for r in rows if r["family"] == "recorded"])
    chosen = (key for key in found if key[0] in PARETO_DATA and key[1] != "bfloat16")
    return {" ".join(key): found[key] for key in sorted(chosen, key=_place)}


def _place(key: tuple[str, str]) -> int:
    return PARETO_DATA.index(key[0])


def _sizes(rows: Rows) -> Figure | None:
    swept = [r for r in rows if r.get("family") == "sizes"]
    if len({r["nbytes"] for r in swept}) < 2:
        return None
    # memcpy and raw are measured beside both data sets; one line each is enough.
    lines: dict[str, Rows] = {}
    for row in sorted(swept, key=lambda r: r["nbytes"]):
        if row["data"] == "half zeros" or row["codec"] not in ("memcpy", "raw"):
            lines.setdefault(row["codec"], []).append(row)
    figure = new_figure(11, 4.3)
    panels = figure.subplots(1, 2, sharey=True)
    for panel, quantity in zip(panels, ("encode", "decode"), strict=True):
        for codec, mine in lines.items():
            _line(panel, codec, [r["nbytes"] for r in mine], mine, quantity)
        panel.set(xlabel="bytes of the tensor", ylabel=LABELS[quantity], yscale="log")
        panel.set_xscale("log", base=2)
        sizes = sorted({r["nbytes"] for r in swept})
        panel.set_xticks(sizes, [show_bytes(n).replace(".0 ", "\n") for n in sizes], fontsize=7)
        panel.minorticks_off()
        panel.grid(alpha=0.3)
    plain_ticks(panels[0].yaxis)  # the panels share it
    panels[0].legend(fontsize=8)
    return figure


def _sparsity(document: dict[str, Any], dtype: str) -> Figure | None:
    found = {data: by for (its, data), by in sweeps(document).items() if its == dtype}
    if not found:
        return None
    figure = new_figure(5.5 * len(found), 9.5)
    panels = figure.subplots(len(QUANTITIES), len(found), squeeze=False)
    for column, (data, by_codec) in enumerate(found.items()):
        for line, quantity in enumerate(QUANTITIES):
            panel = panels[line][column]
            for codec, rows in by_codec.items():
                _line(panel, codec, [100 * r["zeros"] for r in rows], rows, quantity)
            panel.set(ylabel=LABELS[quantity], xlabel="zeros, %", yscale="log")
            panel.grid(alpha=0.3)
        panels[0][column].set_title(f"{data}, {dtype}")
        _without_all_zeros(panels[0][column], by_codec)
        for panel in panels[:, column]:
            plain_ticks(panel.yaxis)
    panels[0][0].legend(fontsize=8)
    return figure


def sweeps(document: dict[str, Any]) -> dict[tuple[str, str], dict[str, Rows]]:
    """The sparsity sweep's rows by (dtype, data), then by codec, in the order of zeros."""
    found: dict[tuple[str, str], dict[str, Rows]] = {}
    rows = [r for r in document["rows"] if r.get("family") == "sparsity"]
    for row in sorted(rows, key=lambda r: r["zeros"]):
        group = found.setdefault((row["dtype"], row["data"]), {})
        group.setdefault(row["codec"], []).append(row)
    return found


def _without_all_zeros(panel: Axes, by_codec: dict[str, Rows]) -> None:
    # A tensor of zeros alone encodes to next to nothing, and would press all else to the bottom.
    rows = [r for rows in by_codec.values() for r in rows]
    usual = max((r["ratio"] for r in rows if r["zeros"] < 1), default=1.0)
    largest = max(r["ratio"] for r in rows)
    panel.set_ylim(0.8, 1.5 * usual)
    if largest > 1.5 * usual:
        panel.text(0.99, 0.97, f"100 %: up to {largest:.0f}", ha="right", va="top", fontsize=8,
                   transform=panel.transAxes)  # fmt: skip


def _line(panel: Axes, codec: str, x: list[float], rows: Rows, quantity: str) -> None:
    colour, marker = STYLES.get(codec, (GREY, "."))
    key = "ratio" if quantity == "ratio" else f"{quantity}_gb_per_s"
    style = "--" if codec == "memcpy" else "-"
    panel.plot(
        x, [r[key] for r in rows], style, color=colour, marker=marker, ms=4, lw=1.3, label=codec
    )
    if quantity != "ratio":
        low = [r["nbytes"] / r[quantity]["high_s"] / 1e9 for r in rows]
        high = [r["nbytes"] / r[quantity]["low_s"] / 1e9 for r in rows]
        panel.fill_between(x, low, high, color=colour, alpha=0.12, lw=0)
