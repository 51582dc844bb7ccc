"""Pictures of the codecs' benchmark: ratio against rate, from the result file."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cswap.display import visible
from cswap.experiments.codecs.case import OWN
from cswap.experiments.codecs.totals import EACH, by_data_set, totals
from cswap.experiments.labels import place
from cswap.palette import BLUE, VERMILION
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from cswap.experiments.codecs.totals import Rows, Total

LOSSLESS, LOSSY = BLUE, VERMILION
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


def own_groups(rows: Rows) -> dict[str, list[Total]]:
    """Codecs by panel: on all of the user's own tensors together, and on the largest."""
    own = [r for r in rows if r.get("family") == OWN]
    sets = by_data_set(own)
    groups: dict[str, list[Total]] = {}
    if len(sets) > 1:
        groups["all of them"] = [t for t in totals(own) if t.codec != EACH]
    for name in sorted(sets, key=lambda name: -sets[name][0].nbytes)[:MOST_PANELS]:
        title = " ".join(map(visible, name)).replace("$", r"\$")  # else matplotlib sets a formula
        groups[title] = sets[name]
    return groups


def pareto(groups: Mapping[str, Sequence[Total]]) -> Figure | None:
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
        place(panel, [(*_point(total), total.codec) for total in mine])
    return figure


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


def _point(total: Total) -> tuple[float, float]:
    # Raw bytes over the time of an encode and a decode, in 1e9 per second; and the ratio.
    return total.nbytes / total.seconds / 1e9, total.ratio


def _pareto_panel(panel: Axes, title: str, found: Sequence[Total]) -> None:
    for lossless, colour, marker, word in (
        (True, LOSSLESS, "o", "lossless"),
        (False, LOSSY, "s", "lossy"),
    ):
        points = [_point(t) for t in found if t.lossless == lossless]
        if points:
            panel.plot(*zip(*points, strict=True), marker, c=colour, label=word, ms=5)
            best = zip(*front(points), strict=True)
            panel.step(*best, where="pre", color=colour, lw=1, alpha=0.7)
    panel.set_title(f"{title}, {found[0].nbytes / 2**20:.3g} MiB", fontsize=10)
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
