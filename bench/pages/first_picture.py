"""The first picture of README and home page: memory goals on a CPU, and on a simulated GPU."""

from __future__ import annotations

import hashlib
from typing import TYPE_CHECKING, Any, Final

from bench.drawing.steps import MIB, add_point
from bench.fit import measure
from bench.fit import report as fit
from bench.pages.committed import RESULTS
from bench.pages.step_tables import TRANSFORMER
from bench.pages.twin_tables import FOLDER
from bench.twin import report as twin
from bench.twin.methods import CHECKPOINT, FIT, PLAIN
from cswap.palette import BLACK, LIGHT
from cswap.report.figure import image_of, new_figure
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

ON_A_CPU: Final = RESULTS / "fit.json"
ON_A_GPU: Final = FOLDER / "h200-pcie5.json"
GPU_MODEL: Final = "gpt2-small"

GOAL: Final = "cswap, a memory goal"
WAYS: Final = {PLAIN: "without cswap", FIT: GOAL, "default": "cswap, the one line"}
"""Methods of the twin as a reader would name them; checkpointing is the other one."""

CHECKPOINTING: Final = "torch.utils.checkpoint"


def is_stale(path: Path) -> bool:
    """Whether there is no picture at a path, or one of other results."""
    return not path.exists() or _digest().encode() not in path.read_bytes()


def draw(path: Path) -> None:
    """Write the picture of the committed results."""
    figure = new_figure(twin.PANEL[0], 2 * twin.PANEL[1])
    cpu, gpu = figure.subplots(2)
    _cpu_panel(cpu, read_object(ON_A_CPU, "file")["rows"])
    _gpu_panel(gpu, read_object(ON_A_GPU, "file")["rows"])
    for axes in (cpu, gpu):
        axes.axhline(1.0, color=BLACK, lw=0.6)
        axes.set(ylabel="step time / plain's", xlim=(0, None))
        axes.title.set_fontsize(twin.WORDS + 1)
        axes.grid(alpha=0.3)
    known = {
        label: handle
        for axes in (gpu, cpu)
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True)
    }
    figure.legend(list(known.values()), list(known), loc="outside lower center", ncols=2)
    path.write_bytes(image_of(figure, "png", {"Source": _digest()}))


def _digest() -> str:
    # A PNG's bytes differ by matplotlib's version, so a copy cannot be compared with another one.
    found = hashlib.sha256()
    for path in (ON_A_CPU, ON_A_GPU):
        found.update(path.read_bytes())
    return found.hexdigest()


def _cpu_panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    names = {
        measure.OFF: WAYS[PLAIN],
        measure.FIT: GOAL,
        measure.CHECKPOINT: CHECKPOINTING,
    }
    for row in rows:
        method = row["method"]
        if row["model"] != TRANSFORMER or row["time_of_off"] is None:
            continue
        look = {"marker": fit.MARKERS[method], "colour": fit.COLOURS[method]}
        add_point(axes, row, row["peak_bytes"], label=names[method], **look)
        if method == measure.FIT:
            _goal_line(axes, row["goal_bytes"] / MIB)
    axes.set(title="A GPT of six blocks on a CPU (measured)", xlabel="peak (MiB)")


def _gpu_panel(axes: Axes, rows: list[dict[str, Any]]) -> None:
    ways = {r["method"]: r for r in rows if r["model"] == GPU_MODEL and "failure" not in r}
    for method, name in {**WAYS, CHECKPOINT: CHECKPOINTING}.items():
        marker, colour = twin.LOOKS[method]
        at = twin.point(ways[method], ways[PLAIN]["step_s"])
        axes.plot(*at, ls="", marker=marker, color=colour, label=name)
    _goal_line(axes, ways[CHECKPOINT]["peak_bytes"] / twin.GIB)
    axes.set(title="GPT-2 small on an H200 (simulated)", xlabel="peak (GiB)")


def _goal_line(axes: Axes, at: float) -> None:
    axes.axvline(at, color=LIGHT, ls=":", lw=1.5, zorder=0, label="goal")
