"""Simulated steps as a table, as a picture, and as a Chrome trace; residuals as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import UNKNOWN, grouped_table
from bench.twin.methods import CHECKPOINT, DEVICE_GOAL, FIT, PLAIN, SELECTIVE
from bench.twin.models import ALL
from cswap import chrome_trace as chrome
from cswap.experiments.labels import place
from cswap.palette import BLACK, BLUE, GREEN, ORANGE, PURPLE, SKY, VERMILION
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes
    from rich.table import Table

GIB: Final = 1 << 30

HEADINGS: Final = (
    *("model", "method", "peak GiB", "predicted", "peak of all steps", "step ms"),
    *("of plain's", "host ms", "link out", "link back", "calls"),
)

NOTE: Final = (
    "All figures are simulated: the real engine in virtual time (`python -m bench twin`). Peak: of "
    "the allocator, in a step that has settled; as the goal's plan predicts it; and with the first "
    "steps. Host: of the step, the time that the host does not wait. Link: share of the step in "
    "which it copies. Calls: of Python functions."
)

RESIDUAL_HEADINGS: Final = (
    *("row", "figure", "fitted", "measured", "simulated", "error", "bound", "holds"),
)

POLICY_HEADINGS: Final = (
    *("model", "policy", "budget GiB", "swapped", "again", "no chain"),
    *("predicted ms", "engine ms", "off", "off, free host"),
    *("predicted GiB", "engine GiB", "off", "holds"),
)

POLICY_NOTE: Final = (
    "All figures are simulated: a plan's step by `cswap.plan.simulate`, and by the real engine "
    "that follows the plan in virtual time. Again: computed again; no chain: swapped instead. "
    "Free host: where the host takes no time. Holds: time and peak are off by at most 10 %."
)

LARGEST_HEADINGS: Final = (
    *("model", "GPU, link", "plain", "checkpoint", 'fit="device"'),
    *("of plain's", "checkpoint: samples/s of plain's", 'fit="device": samples/s of plain\'s'),
)

LARGEST_NOTE: Final = (
    "All figures are simulated. The largest batch that trains, each with a tenth of the memory "
    'left; and its samples per second over those of the largest plain batch. `fit="device"` moves '
    "and computes again only as much as its batch needs."
)

BAR: Final = 0.1
"""Largest share by which a prediction is to be off."""

LOOKS: Final = {
    PLAIN: ("o", BLACK),
    CHECKPOINT: ("s", GREEN),
    SELECTIVE: ("P", GREEN),
    "save_on_cpu": ("X", ORANGE),
    "TRL's offload": ("X", PURPLE),
    "default": ("v", BLUE),
    "raw": ("v", SKY),
    "int8": ("v", VERMILION),
    FIT: ("D", BLUE),
    DEVICE_GOAL: ("^", BLUE),
}
"""Marker and colour of a method's point."""

SHORT: Final = {SELECTIVE: "selective", "TRL's offload": "TRL", FIT: "fit=checkpoint"}
"""Names of methods in the picture, where they are too long for it."""

PANEL: Final = (4.8, 3.3)
"""Inches of a panel: in one column, its words can be read on a telephone, 390 pixels wide."""

WORDS: Final = 10
"""Size of the picture's words, in points."""

TICKS: Final = (1, 1.2, 1.5, 2, 3, 5, 10)
"""Of the times, on a long logarithmic axis: most are little more than plain's."""

BEST: Final = "the best possible (linear program)"


def cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per row, of `HEADINGS`."""
    plain = {r["model"]: r.get("step_s") for r in document["rows"] if r["method"] == PLAIN}
    return [_line(row, plain.get(row["model"])) for row in document["rows"]]


def _line(row: dict[str, Any], plain_s: float | None) -> list[str]:
    start = [ALL[row["model"]].name, row["method"]]
    if "failure" in row:
        return [*start, row["failure"][:72], *[UNKNOWN] * (len(HEADINGS) - 3)]
    step_s = row["step_s"]
    out, back = (row["link_s"][way] / step_s for way in ("out", "back"))
    return [
        *start,
        f"{row['peak_bytes'] / GIB:.2f}",
        # Of a goal alone; files from before this column have no such field.
        UNKNOWN if row.get("predicted_bytes") is None else f"{row['predicted_bytes'] / GIB:.2f}",
        f"{row['peak_of_all_bytes'] / GIB:.2f}",
        f"{1e3 * step_s:.1f}",
        UNKNOWN if not plain_s else f"{step_s / plain_s:.3f}",
        f"{1e3 * row['host_s']:.1f}",
        f"{out:.0%}",
        f"{back:.0%}",
        str(row["calls"].get("python", 0)),
    ]


def table(document: dict[str, Any]) -> Table:
    """For a terminal."""
    title = f"Training steps on {document['settings']['profile']}, simulated"
    return grouped_table(title, NOTE, HEADINGS, ("model", "method"), cells(document))


def residual_cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per residual, of `RESIDUAL_HEADINGS`."""
    return [
        [
            *(r["row"], r["figure"], "yes" if r["fitted"] else "no"),
            *(f"{r[k]:.2f}" for k in ("measured", "simulated")),
            *(f"{r['error']:+.1%}", f"{r['bound']:.0%}", "yes" if r["holds"] else "no"),
        ]
        for r in document["rows"]
    ]


def residuals(document: dict[str, Any]) -> Table:
    """For a terminal."""
    title = "The twin against the rows measured on an H200"
    return grouped_table(title, "", RESIDUAL_HEADINGS, ("row", "figure"), residual_cells(document))


def policy_cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per policy, of `POLICY_HEADINGS`."""
    return [_policy_line(row) for row in document["rows"]]


def _policy_line(row: dict[str, Any]) -> list[str]:
    done, free, predicted = row["done"], row["free_host"], row["predicted"]
    start = [ALL[row["model"]].name, row["policy"], f"{row['budget_bytes'] / GIB:.2f}"]
    if "failure" in done or "failure" in free:
        failure = done.get("failure") or free["failure"]
        return [*start, failure[:72], *[UNKNOWN] * (len(POLICY_HEADINGS) - 4)]
    moved = dict(done["moved"])
    again = moved.pop("remat", 0.0)
    missing = row["actions"].get("recompute", 0) - again
    step, bare, peak = (
        figures[k] / predicted[k] - 1
        for figures, k in ((done, "step_s"), (free, "step_s"), (done, "peak_bytes"))
    )
    return [
        *start,
        *(f"{n:.0f}" for n in (sum(moved.values()), again, missing)),
        f"{1e3 * predicted['step_s']:.1f}",
        f"{1e3 * done['step_s']:.1f}",
        *(f"{step:+.1%}", f"{bare:+.1%}"),
        f"{predicted['peak_bytes'] / GIB:.2f}",
        f"{done['peak_bytes'] / GIB:.2f}",
        f"{peak:+.1%}",
        "yes" if max(abs(step), abs(peak)) <= BAR else "no",
    ]


def policies(document: dict[str, Any]) -> Table:
    """For a terminal."""
    title = f"Plans on {document['settings']['profile']}, predicted and followed, simulated"
    lines = policy_cells(document)
    return grouped_table(title, POLICY_NOTE, POLICY_HEADINGS, ("model", "policy"), lines)


def largest_cells(document: dict[str, Any]) -> list[list[str]]:
    """A line per model and machine, of `LARGEST_HEADINGS`."""
    found: dict[tuple[str, str], dict[str, Any]] = {}
    for row in document["rows"]:
        found.setdefault((row["model"], row["profile"]), {})[row["method"]] = row
    return [
        [ALL[model].name, profile, *_batches(by_way)] for (model, profile), by_way in found.items()
    ]


def _batches(by_way: dict[str, Any]) -> list[str]:
    ways = [by_way[way] for way in (PLAIN, CHECKPOINT, DEVICE_GOAL)]
    plain, *others = (None if "failure" in row else row for row in ways)
    batches = [UNKNOWN if row is None else str(row["batch"]) for row in (plain, *others)]
    if plain is None:
        return [*batches, *[UNKNOWN] * 3]
    rates = [None if row is None else row["batch"] / row["step_s"] for row in (plain, *others)]
    most = others[-1]
    return [
        *batches,
        UNKNOWN if most is None else f"{most['batch'] / plain['batch']:.1f}",
        *(UNKNOWN if rate is None else f"{rate / rates[0]:.2f}" for rate in rates[1:]),
    ]


def largest(document: dict[str, Any]) -> Table:
    """For a terminal."""
    title = "The largest batch that a GPU holds, simulated"
    lines = largest_cells(document)
    return grouped_table(title, LARGEST_NOTE, LARGEST_HEADINGS, ("model", "GPU, link"), lines)


def draw(document: dict[str, Any], path: Path) -> None:
    """A panel per model: step time over plain's against the allocator's peak, and the optimum."""
    by_model: dict[str, list[dict[str, Any]]] = {}
    for row in document["rows"]:
        if "failure" not in row:
            by_model.setdefault(row["model"], []).append(row)
    plain_s = {
        model: row["step_s"]
        for model, rows in by_model.items()
        for row in rows
        if row["method"] == PLAIN
    }
    width, height = PANEL
    figure = new_figure(width, height * max(1, len(plain_s)))
    panels = figure.subplots(max(1, len(plain_s)), squeeze=False).flatten()
    for (model, seconds), axes in zip(plain_s.items(), panels, strict=False):
        _panel(axes, by_model[model], document["optimum"][model], seconds)
        axes.set_title(f"{ALL[model].name} (simulated)", fontsize=WORDS + 1)
    figure.legend(*panels[0].get_legend_handles_labels(), loc="outside lower center")
    figure.draw_without_rendering()  # lays the panels out: words are placed in pixels
    for (model, seconds), axes in zip(plain_s.items(), panels, strict=False):
        points = [(*point(row, seconds), row["method"]) for row in by_model[model]]
        place(axes, [(x, y, SHORT.get(method, method)) for x, y, method in points], WORDS)
    path.write_bytes(png_of(figure))


def _panel(
    axes: Axes, rows: list[dict[str, Any]], optimum: list[dict[str, Any]], plain_s: float
) -> None:
    from matplotlib.ticker import FixedLocator

    curve = [point(one, plain_s) for one in optimum if one["step_s"] is not None]
    axes.plot(*zip(*curve, strict=True), color=BLACK, lw=1, ls="--", label=BEST)
    for row in rows:
        marker, colour = LOOKS[row["method"]]
        axes.plot(*point(row, plain_s), ls="", ms=7, marker=marker, color=colour)
    axes.set(yscale="log", xlabel="peak (GiB)", ylabel="step time / plain's")
    axes.margins(y=0.08)
    plain_ticks(axes.yaxis)
    low, high = axes.get_ylim()
    if high > 3 * low:
        axes.yaxis.set_major_locator(FixedLocator(TICKS))
    axes.grid(alpha=0.3)


def point(row: dict[str, Any], plain_s: float) -> tuple[float, float]:
    """Peak in GiB, and step time over plain's."""
    return row["peak_bytes"] / GIB, row["step_s"] / plain_s


def chrome_trace(row: dict[str, Any]) -> dict[str, Any]:
    """A row's last step, a lane per stream."""
    lanes = list(dict.fromkeys(stream for stream, *_ in row["spans"]))
    events = [chrome.lane(0, i, name) for i, name in enumerate(lanes)]
    events += [
        chrome.span(0, lanes.index(stream), name, began_s, ended_s, {})
        for stream, name, began_s, ended_s in row["spans"]
    ]
    about = {key: row[key] for key in ("model", "method", "profile", "step_s")}
    return chrome.document(events, {**about, "simulated": True})
