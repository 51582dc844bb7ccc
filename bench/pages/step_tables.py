"""Tables of training steps, in Markdown, from the committed result files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from bench.drawing.steps import MIB
from bench.fit import report as fit_report
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


_WAYS: Final = {
    "off": "plain",
    "remat": "cswap, the one line: `cswap.install(model)`",
    "checkpoint": "`torch.utils.checkpoint`, every block",
}
"""The demo's ways that the first table has, as a reader would write them."""

TRANSFORMER: Final = "gpt6"
"""The model of the first table, in the demo's results and in those of memory goals."""


def demo_table() -> str:
    """The demo's comparison."""
    data = load("demo.json")
    rows = [
        [
            f"{r['model']} {r['mode']}",
            f"{r['peak_saved_bytes'] / MIB:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['step_time_rel']:.2f}",
            f"{r['final_loss']:.4f}",
            f"{100 * r['accuracy']:.1f}",
            "yes" if r["bit_equal"] else "no",
            f"{r['max_grad_diff']:.1e}",
        ]
        for r in data["rows"]
    ]
    headings = ["run", "peak saved MiB", "raw / encoded", "step time, off = 1", "val. loss"]
    headings += ["accuracy %", "bit-equal to off", "largest gradient difference"]
    return as_markdown(headings, rows) + "\n\n" + where(data, "demo.json")


def transformer_table() -> str:
    """The demo's GPT: plain, with cswap, and with checkpointing. The table of README and home."""
    demo, fit = load("demo.json"), load("fit.json")
    rows = [
        (_WAYS[r["mode"]], r["peak_saved_bytes"], r["step_time_rel"], r["bit_equal"])
        for r in demo["rows"]
        if r["model"] == TRANSFORMER and r["mode"] in _WAYS
    ]
    rows.append(_smallest_goal([r for r in fit["rows"] if r["model"] == TRANSFORMER]))
    plain_bytes = rows[0][1]
    cells = [
        [
            way,
            f"{nbytes / MIB:.1f}",
            f"{nbytes / plain_bytes:.0%}",
            f"{time:.2f}",
            "equal" if bits else "differ",
        ]
        for way, nbytes, time, bits in sorted(rows, key=lambda row: -row[1])
    ]
    headings = ["training step", "saved MiB at peak", "of plain's", "time / plain's", "gradients"]
    goal = where(fit, "fit.json").removesuffix(".")
    files = f"{where(demo, 'demo.json')} {goal} (the goal)."
    return f"{as_markdown(headings, cells)}\n\n{files}"


def _smallest_goal(rows: list[dict[str, Any]]) -> tuple[str, float, float, bool]:
    # Of the goals that were held: how, saved bytes at the peak, time over plain's, and bits. Its
    # peak includes parameters and optimizer state, which two goals tell.
    goals = [r for r in rows if r["method"] == "fit"]
    small, large = (f(goals, key=lambda r: r["share"]) for f in (min, max))
    saved_bytes = (large["goal_bytes"] - small["goal_bytes"]) / (large["share"] - small["share"])
    resident_bytes = large["goal_bytes"] - large["share"] * saved_bytes
    r = min((r for r in goals if r["held"]), key=lambda r: r["share"])
    way = f"cswap, a goal of {r['share']:.0%}: `cswap.install(model, fit=...)`"
    return way, r["peak_bytes"] - resident_bytes, r["time_of_off"], r["bit_equal"]


def swap_table() -> str:
    """Training steps in every way to swap or recompute."""
    return _reported("swap", swap_report, "step time over off's against peak saved bytes")


def fit_table() -> str:
    """Memory goals, held by cswap and by checkpointing."""
    return _reported("fit", fit_report, "step time over off's against the peak of memory")


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


def _reported(name: str, report: _Report, picture: str = "") -> str:
    # The picture of that name, if it is described; the table; the notes.
    data = load(f"{name}.json")
    shown = f"![{picture}]({name}.png)\n\n" if picture else ""
    table = as_markdown(report.HEADINGS, list(report.cells(data)))
    return f"{shown}{table}\n\n{report.NOTE} {where(data, f'{name}.json')}"
