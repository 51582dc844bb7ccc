"""Tables of training steps, in Markdown, from the committed result files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from bench.demo import report as demo_report
from bench.drawing.steps import MIB
from bench.fit import report as fit_report
from bench.fit.measure import FIT, OFF
from bench.frameworks import report as frameworks_report
from bench.inlined import report as inlined_report
from bench.pages.committed import as_markdown, load, where
from bench.swap import report as swap_report

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence


class _Report(Protocol):
    """A module that words the rows of a kind of result file."""

    @property
    def HEADINGS(self) -> Sequence[str]: ...  # noqa: N802 - the modules' constants
    @property
    def NOTE(self) -> str: ...  # noqa: N802
    def cells(self, document: dict[str, Any], /) -> Iterable[list[str]]: ...


TRANSFORMER: Final = "gpt6"
"""The model of the first table and picture."""


def demo_table() -> str:
    """The demo's comparison."""
    return _reported("demo", demo_report)


def transformer_table() -> str:
    """A GPT in each goal that was held: the table of README and home page."""
    data = load("fit.json")
    rows = [r for r in data["rows"] if r["model"] == TRANSFORMER]
    resident_bytes = _resident_bytes(rows)
    plain_bytes = next(r["peak_bytes"] for r in rows if r["method"] == OFF) - resident_bytes
    cells = []
    for r in rows:
        saved_bytes = (r["peak_bytes"] or 0) - resident_bytes
        if r["held"] is not False and r["time_of_off"] is not None:
            share = f"{saved_bytes / plain_bytes:.0%}"
            figures = [f"{saved_bytes / MIB:.1f}", share, f"{r['time_of_off']:.2f}"]
            cells.append([_way(r), *figures, "equal" if r["bit_equal"] else "differ"])
    headings = ["training step", "saved MiB at peak", "of plain's", "time / plain's", "gradients"]
    return f"{as_markdown(headings, cells)}\n\n{where(data, 'fit.json')}"


def _resident_bytes(rows: list[dict[str, Any]]) -> float:
    # Of parameters and optimizer state, which peaks and goals include: two goals tell.
    goals = [r for r in rows if r["method"] == FIT]
    small, large = (f(goals, key=lambda r: r["share"]) for f in (min, max))
    saved_bytes = (large["goal_bytes"] - small["goal_bytes"]) / (large["share"] - small["share"])
    return float(large["goal_bytes"] - large["share"] * saved_bytes)


def _way(row: dict[str, Any]) -> str:
    if row["method"] == OFF:
        return "plain"
    way = "`cswap.install(model, fit=...)`"
    if row["method"] != FIT:
        way = f"`torch.utils.checkpoint`, {row['how']}"
    return f"a goal of {row['share']:.0%}: {way}"


def swap_table() -> str:
    """Training steps in every way to swap or recompute."""
    return _reported("swap", swap_report, "step time over off's against peak saved bytes")


def fit_table() -> str:
    """Memory goals, held by cswap and by checkpointing."""
    picture = "step time over off's against the peak of memory"
    return _reported("fit", fit_report, picture, "fit-cpu.png")


def inlined_table() -> str:
    """Compiled models with codecs inside of their graphs."""
    return _reported("inlined", inlined_report)


def workloads_table() -> str:
    """Models of other packages, trained in every way."""
    return _workloads("workloads")


def more_workloads_table() -> str:
    """Those of the second set."""
    return _workloads("workloads-second")


def _workloads(name: str) -> str:
    summary = frameworks_report.summary(load(f"{name}.json"))
    return f"{summary}\n\n{_reported(name, frameworks_report)}"


def _reported(name: str, report: _Report, picture: str = "", file: str = "") -> str:
    # The picture, if it is described, of that name or in that file; the table; the notes.
    data = load(f"{name}.json")
    shown = f"![{picture}]({file or f'{name}.png'})\n\n" if picture else ""
    table = as_markdown(report.HEADINGS, list(report.cells(data)))
    return f"{shown}{table}\n\n{report.NOTE} {where(data, f'{name}.json')}"
