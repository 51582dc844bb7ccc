"""The advisor's benchmark as tables and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import grouped_table
from cswap.palette import BLACK, BLUE, GREEN, GREY, VERMILION
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from rich.table import Table

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

HEADINGS: Final = ("model, lossy codecs", "oracle, ms", *KEYS, "which static")
PREDICTION_HEADINGS: Final = ("codec", "median error", "largest error", "tensors")


def cells(result: dict[str, Any]) -> list[list[str]]:
    """The cost of a step over the oracle's, a row per model and mode, of HEADINGS."""
    return [
        [
            f"{r['model']}{' (unseen)' * r.get('unseen', False)}, {r['mode']}",
            f"{1e3 * r['oracle_s']:.1f}",
            *(f"{r[key] / r['oracle_s']:.3f}" for key in KEYS.values()),
            f"`{r['best_static']}`",
        ]
        for r in result["cells"]
    ]


def prediction_cells(result: dict[str, Any]) -> list[list[str]]:
    """Predicted against true ratios, a row per codec, of PREDICTION_HEADINGS."""
    return [
        [f"`{codec}`", f"{r['median']:.1%}", f"{r['largest']:.1%}", f"{r['tensors']:.0f}"]
        for codec, r in result["prediction"].items()
    ]


def tables(result: dict[str, Any]) -> Iterator[Table]:
    """Return the tables for a terminal."""
    for title, headings, lines in (
        ("Cost of a step over the oracle's", HEADINGS, cells(result)),
        (
            "Predicted against true ratio: absolute relative error",
            *(PREDICTION_HEADINGS, prediction_cells(result)),
        ),
    ):
        yield grouped_table(title, "", headings, headings[:1], lines)


def draw(rows: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of cost over the oracle's."""
    figure = new_figure(9, 3)
    axes = figure.subplots()
    for i, (label, key) in enumerate(KEYS.items()):
        heights = [row[key] / row["oracle_s"] for row in rows]
        places = [at + 0.2 * (i - 1.5) for at in range(len(rows))]
        axes.bar(places, heights, 0.2, color=COLOURS[label], label=label)
    axes.axhline(1.0, color=BLACK, lw=0.8)
    axes.set(
        ylabel="cost / oracle's",
        yscale="log",
        xticks=range(len(rows)),
        xticklabels=[f"{row['model']}\n{row['mode']}" for row in rows],
    )
    plain_ticks(axes.yaxis)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=4, fontsize=8)
    path.write_bytes(png_of(figure))
