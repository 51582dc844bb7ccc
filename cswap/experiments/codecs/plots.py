"""Pictures of the codecs' benchmark: ratio against rate, from the result file."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Any, Final

from cswap.display import visible
from cswap.experiments.codecs.case import OWN
from cswap.experiments.codecs.totals import EACH, by_data_set, totals
from cswap.experiments.labels import place
from cswap.palette import BLUE, VERMILION
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cswap.experiments.codecs.totals import Rows, Total

LOSSLESS, LOSSY = BLUE, VERMILION
FAR: Final = 4.0
"""A codec that is slower by this factor than all others is drawn at the edge of its panel, so that
it does not press the others together."""

_EDGE: Final = 2.0
"""Factor from the slowest of the others to the edge."""

RATIO: Final = "raw / encoded bytes"
MOST_PANELS: Final = 5
"""Of the user's own tensors, beside that of all of them together."""


def draw(document: dict[str, Any], folder: Path, stem: str) -> list[Path]:
    """Write the picture of the user's own tensors, ``<stem>-pareto.png``; returns its path."""
    return write({"pareto": pareto(own_groups(document["rows"]))}, folder, stem)


def write(figures: Mapping[str, Figure | None], folder: Path, stem: str) -> list[Path]:
    """Write those figures that there are as ``<stem>-<name>.png``; returns their paths."""
    found = {folder / f"{stem}-{name}.png": f for name, f in figures.items() if f is not None}
    for path, figure in found.items():
        path.write_bytes(png_of(figure))
    return list(found)


def own_groups(rows: Rows) -> dict[str, Rows]:
    """Rows by panel: all of the user's own tensors together, and the largest."""
    own = [r for r in rows if r.get("family") == OWN]
    sets = by_data_set(own)
    groups: dict[str, Rows] = {}
    if len(sets) > 1:
        groups["all of them"] = [_as_row(t) for t in totals(own) if t.codec != EACH]
    for name in sorted(sets, key=lambda name: -sets[name][0].nbytes)[:MOST_PANELS]:
        title = " ".join(map(visible, name)).replace("$", r"\$")  # else matplotlib sets a formula
        groups[title] = [_as_row(total) for total in sets[name]]
    return groups


def pareto(groups: Mapping[str, Rows]) -> Figure | None:
    """Ratio against rate, a panel per group; None without any."""
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
        ylabel=RATIO,
        xscale="log",
        yscale="log",
    )
    panel.margins(0.12)
    plain_ticks(panel.xaxis)
    plain_ticks(panel.yaxis)
    panel.grid(alpha=0.3)
