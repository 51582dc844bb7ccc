"""Pictures of the codecs' benchmark: ratio against rate, rates by size, sweeps over sparsity.

All from the result file. Every codec has a marker of its own.
"""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from cswap.display import visible
from cswap.experiments.codecs.cases import OWN
from cswap.experiments.codecs.crossovers import QUANTITIES, Crossover, crossovers, sweeps
from cswap.experiments.codecs.tables import size_words
from cswap.experiments.codecs.totals import EACH, by_data_set, totals
from cswap.experiments.drawing.labels import place
from cswap.palette import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILION
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cswap.experiments.codecs.crossovers import Rows
    from cswap.experiments.codecs.totals import Total

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

LOSSLESS, LOSSY = BLUE, VERMILION
FAR: Final = 4.0
"""A codec that is slower by this factor than all others is drawn at the edge of its panel, so that
it does not press the others together."""

_EDGE: Final = 2.0
"""Factor from the slowest of the others to the edge."""

PARETO_DATA: Final = ("relu", "gelu", "softmax", "gradient", "mask", "token")
MOST_PANELS: Final = 5
"""Of the user's own tensors, beside that of all of them together."""

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
        "pareto": _pareto(document["rows"]),
        "sizes": _sizes(document["rows"]),
        **{f"sparsity-{dtype}": _sparsity(document, dtype) for dtype in ("float32", "bfloat16")},
    }
    written = []
    for name, figure in figures.items():
        if figure is not None:
            path = folder / f"{stem}-{name}.png"
            path.write_bytes(png_of(figure))
            written.append(path)
    return written


def round_trip_gb_per_s(row: dict[str, Any]) -> float:
    """Raw bytes over the time of an encode and a decode, in 1e9 per second."""
    return float(1 / (1 / row["encode_gb_per_s"] + 1 / row["decode_gb_per_s"]))


def front(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    """The points that no other point beats in both coordinates, in the order of the first.

    >>> front([(1, 5), (2, 4), (3, 1), (2, 2), (3, 3)])
    [(1, 5), (2, 4), (3, 3)]
    """
    found: list[tuple[float, float]] = []
    for point in sorted(points, reverse=True):
        if not found or point[1] > found[-1][1]:
            found.append(point)
    return found[::-1]


def _pareto(rows: Rows) -> Figure | None:
    groups = _pareto_groups(rows)
    if not groups:
        return None
    n_lines = -(-len(groups) // 2)
    figure = new_figure(11, 3.9 * n_lines)
    panels = figure.subplots(n_lines, 2, squeeze=False)
    for panel in panels.flat[len(groups) :]:
        panel.set_axis_off()
    for panel, (title, mine) in zip(panels.flat, groups.items(), strict=False):
        _pareto_panel(panel, title, mine)
    handles, labels = panels[0][0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=2, fontsize=8)
    figure.draw_without_rendering()  # lays the panels out: words are placed in pixels
    for panel, mine in zip(panels.flat, groups.values(), strict=False):
        place(panel, _words(mine))
    return figure


def _edge(rows: Rows) -> float:
    """The rate at which a panel begins for a codec that is `FAR` slower than all others; else 0."""
    rates = sorted(map(round_trip_gb_per_s, rows))
    return rates[1] / _EDGE if len(rates) > 2 and rates[1] > FAR * rates[0] else 0.0


def _words(rows: Rows) -> Iterator[tuple[float, float, str]]:
    edge = _edge(rows)
    for row in rows:
        rate = round_trip_gb_per_s(row)
        said = f"{row['codec']}: {rate:.2g} GB/s" if rate < edge else row["codec"]
        yield max(edge, rate), row["ratio"], said


def _pareto_groups(rows: Rows) -> dict[str, Rows]:
    # Rows by panel; of the user's own tensors all together, and the largest.
    recorded = [r for r in rows if r.get("family", "recorded") == "recorded"]
    groups: dict[str, Rows] = {}
    for kind in PARETO_DATA:
        mine = [r for r in recorded if r["data"] == kind and r["dtype"] != "bfloat16"]
        if mine:
            groups[f"{kind} {mine[0]['dtype']}"] = mine
    own = [r for r in rows if r.get("family") == OWN]
    sets = by_data_set(own)
    if len(sets) > 1:
        groups["all of them"] = [_as_row(t) for t in totals(own) if t.codec != EACH]
    for name in sorted(sets, key=lambda name: -sets[name][0].nbytes)[:MOST_PANELS]:
        title = " ".join(map(visible, name)).replace("$", r"\$")  # else matplotlib sets a formula
        groups[title] = [_as_row(total) for total in sets[name]]
    return groups


def _as_row(total: Total) -> dict[str, Any]:
    return {
        **asdict(total),
        "ratio": total.ratio,
        "encode_gb_per_s": total.nbytes / total.encode_s / 1e9,
        "decode_gb_per_s": total.nbytes / total.decode_s / 1e9,
    }


def _pareto_panel(panel: Axes, title: str, rows: Rows) -> None:
    edge = _edge(rows)
    for lossless, colour, marker, word in (
        (True, LOSSLESS, "o", "lossless"),
        (False, LOSSY, "s", "lossy"),
    ):
        mine = [r for r in rows if r["lossless"] == lossless]
        if not mine:
            continue
        points = [(round_trip_gb_per_s(r), r["ratio"]) for r in mine]
        near = [(x, y) for x, y in points if x >= edge]
        panel.plot([x for x, _ in near], [y for _, y in near], marker, c=colour, label=word, ms=5)
        for _, y in (point for point in points if point not in near):
            panel.plot(edge, y, "<", color=colour, ms=8)
        best = [(max(edge, x), y) for x, y in front(points)]
        panel.step(*zip(*best, strict=True), where="pre", color=colour, lw=1, alpha=0.7)
    panel.set_title(f"{title}, {rows[0]['nbytes'] / 2**20:.3g} MiB", fontsize=10)
    panel.set(
        xlabel="encode and decode, GB/s of raw bytes",
        ylabel=LABELS["ratio"],
        xscale="log",
        yscale="log",
    )
    panel.margins(0.12)
    plain_ticks(panel.xaxis)
    plain_ticks(panel.yaxis)
    panel.grid(alpha=0.3)


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
        panel.set_xticks(sizes, [size_words(n).replace(" ", "\n") for n in sizes], fontsize=7)
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
    crossed = [c for c in crossovers(document) if c.dtype == dtype]
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
    figure.draw_without_rendering()  # lays the panels out: words are placed in pixels
    for column, data in enumerate(found):
        for line, quantity in enumerate(QUANTITIES):
            mine = [c for c in crossed if (c.data, c.quantity) == (data, quantity)]
            _mark(panels[line][column], mine)
    return figure


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


def _mark(panel: Axes, crossed: list[Crossover]) -> None:
    for c in crossed:
        panel.plot(100 * c.zeros, c.value, "o", ms=9, mfc="none", mec="black", mew=1.1)
    place(
        panel,
        [(100 * c.zeros, c.value, f"{c.above} > {c.below} from {c.zeros:.0%}") for c in crossed],
    )
