"""The benchmarks' pictures, made from result files; none where matplotlib is not installed."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cswap.errors import UnsupportedError
from cswap.experiments.labels import place
from cswap.palette import BLUE, CYCLE, GREEN, GREY
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from matplotlib.axes import Axes

MIB: Final = 1 << 20
GIB: Final = 1 << 30
INCHES: Final = (6.0, 4.3)
"""Of one panel."""

Rows = list[dict[str, Any]]


def draw(document: dict[str, Any], path: Path) -> Path | None:
    """Write the picture of one result file; None if there is nothing to draw, or to draw with."""
    panels = [(paint, rows) for paint, rows in _PANELS[document["part"]](document["rows"]) if rows]
    if not panels:
        return None
    width, height = INCHES
    try:
        figure = new_figure(2 * width, height * len(panels))
    except UnsupportedError:
        return None
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    for (paint, rows), ax in zip(panels, axes, strict=True):
        ax.set_prop_cycle(color=CYCLE)
        paint(ax, rows)
    figure.suptitle(document["environment"]["gpu"]["name"])
    figure.draw_without_rendering()  # lays the panels out: words are placed in pixels
    for (paint, rows), ax in zip(panels, axes, strict=True):
        if paint is _memory_and_time:
            place(ax, [(*_memory_and_ms(row), row["method"]) for row in rows])
    path.write_bytes(png_of(figure))
    return path


def _groups(rows: Iterable[dict[str, Any]], *keys: str) -> dict[str, Rows]:
    found: dict[str, Rows] = {}
    for row in rows:
        found.setdefault(" ".join(str(row[key]) for key in keys), []).append(row)
    return found


def _codec_panels(rows: Rows) -> list[tuple[Any, Rows]]:
    usual = [r for r in rows if r["threads"] is None]
    sizes = {name: {r["nbytes"] for r in group} for name, group in _groups(usual, "codec").items()}
    largest_set = max(
        _groups(usual, "nbytes").values(),
        key=lambda g: len(_groups(g, "data", "dtype")),
        default=[],
    )
    swept = [r for r in usual if len(sizes[r["codec"]]) > 1 and r["codec"] != "copy"]
    return [(_rates, largest_set), (_rates_by_size, swept)]


def _rates(axes: Axes, rows: Rows) -> None:
    groups = _groups(rows, "data", "dtype")
    places, labels, place = [], [], 0
    for name, group in groups.items():
        for row in group:
            axes.bar(place - 0.2, row["encode_gb_per_s"], 0.4, color=BLUE)
            axes.bar(place + 0.2, row["decode_gb_per_s"], 0.4, color=GREEN)
            places.append(place)
            labels.append(f"{row['codec']} on {name}")
            place += 1
        place += 1
    axes.set_xticks(places, labels, rotation=90, fontsize=6)
    axes.set(ylabel="GB/s of raw bytes", title="encode (blue), decode (green)")
    axes.grid(alpha=0.3, axis="y")


def _rates_by_size(axes: Axes, rows: Rows) -> None:
    for name, group in _groups(rows, "codec", "data", "dtype").items():
        ordered = sorted(group, key=lambda r: r["nbytes"])
        sizes = [r["nbytes"] / MIB for r in ordered]
        if len(set(sizes)) < 2:
            continue
        axes.plot(sizes, [r["encode_gb_per_s"] for r in ordered], "o-", label=f"{name}, encode")
        axes.plot(sizes, [r["decode_gb_per_s"] for r in ordered], "s--", label=f"{name}, decode")
    _over_sizes(axes, "GB/s of raw bytes")


def _link_panels(rows: Rows) -> list[tuple[Any, Rows]]:
    copies = [r for r in rows if not r["blocks"]]
    return [(_copies, copies), (_stores, [r for r in rows if r["blocks"]])]


def _copies(axes: Axes, rows: Rows) -> None:
    for name, group in _groups(rows, "way").items():
        axes.plot(
            [r["nbytes"] / MIB for r in group], [r["gb_per_s"] for r in group], "o-", label=name
        )
    _over_sizes(axes, "GB/s")


def _stores(axes: Axes, rows: Rows) -> None:
    for name, group in _groups(rows, "way").items():
        axes.plot([r["blocks"] for r in group], [r["gb_per_s"] for r in group], "o-", label=name)
    axes.set(xlabel="thread blocks", ylabel="GB/s across the link", xscale="log")
    plain_ticks(axes.xaxis)
    axes.legend()
    axes.grid(alpha=0.3)


def _swap_panels(rows: Rows) -> list[tuple[Any, Rows]]:
    return [(_latencies, group) for group in _groups(rows, "data", "dtype").values()]


def _latencies(axes: Axes, rows: Rows) -> None:
    for name, group in _groups(rows, "way").items():
        sizes = [r["nbytes"] / MIB for r in group]
        axes.plot(sizes, [1e3 * r["total_s"] for r in group], "o-", label=name)
    _over_sizes(axes, "ms out and back")
    axes.set(yscale="log", title=f"{rows[0]['data']} {rows[0]['dtype']}")
    plain_ticks(axes.yaxis)


def _over_sizes(axes: Axes, ylabel: str) -> None:
    axes.set(xlabel="MiB", ylabel=ylabel, xscale="log")
    plain_ticks(axes.xaxis)
    axes.legend(fontsize=7)
    axes.grid(alpha=0.3)


def _training_panels(rows: Rows) -> list[tuple[Any, Rows]]:
    done = [r for r in rows if r["failure"] is None]
    return [(_memory_and_time, group) for group in _groups(done, "model").values()]


def _memory_and_ms(row: dict[str, Any]) -> tuple[float, float]:
    return row["peak_allocated_bytes"] / GIB, row["step_ms"]


def _memory_and_time(axes: Axes, rows: Sequence[dict[str, Any]]) -> None:
    for row in rows:
        axes.plot(*_memory_and_ms(row), "o", color=BLUE if row["cswap"] else GREY)
    axes.set(
        title=f"{rows[0]['model']}, batch {rows[0]['batch']}",
        xlabel="peak allocated (GiB)",
        ylabel="ms per step",
        xlim=(0, None),
        ylim=(0, None),
    )
    axes.grid(alpha=0.3)


_PANELS: Final = {
    "codecs": _codec_panels,
    "link": _link_panels,
    "swap": _swap_panels,
    "training": _training_panels,
    "trace": lambda _rows: [],
}
