"""The demo's picture: losses, bytes of saved tensors in a step, and step time against memory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.palette import BLUE, GREEN, GREY, SKY, VERMILION
from cswap.report.figure import new_figure, png_of

if TYPE_CHECKING:
    from pathlib import Path

    from matplotlib.axes import Axes

    from bench.demo.summary import Row
    from bench.workloads.lockstep import Lockstep

MIB = 1 << 20
TITLES = {
    "cnn": "CNN on handwritten digits",
    "gpt": "GPT on Python source",
    "gpt6": "GPT of six blocks",
}
# (colour, line style, width): the widest is drawn first, so that equal curves stay visible
STYLES = {
    "off": (GREY, "-", 4.5),
    "lossless": (SKY, "-", 1.6),
    "remat": (BLUE, "-.", 1.5),
    "int8": (VERMILION, "--", 1.4),
    "checkpoint": (GREEN, ":", 1.8),
}


def draw(runs: list[Lockstep], rows: list[Row], path: Path) -> None:
    """Write the picture of the runs that have something to show."""
    figure = new_figure(17, 4.3 * len(runs))
    axes = figure.subplots(len(runs), 3, squeeze=False)
    for run, (left, middle, right) in zip(runs, axes, strict=True):
        _losses(run, left)
        _bytes(run, middle)
        _time_against_memory([row for row in rows if row.model == run.task.name], right)
    path.write_bytes(png_of(figure))


def _losses(run: Lockstep, axes: Axes) -> None:
    for replica in run.replicas:
        colour, style, width = STYLES[replica.mode]
        log = replica.log
        n = range(1, len(log.losses) + 1)
        axes.plot(n, log.losses, style, color=colour, lw=width, label=replica.mode)
        seen = [validation.n_steps for validation in log.validations]
        losses = [validation.loss for validation in log.validations]
        axes.plot(seen, losses, "o", color=colour, ms=3 + 2 * width, mfc="none")
    axes.set(
        title=f"{TITLES[run.task.name]}: loss",
        xlabel="training step",
        ylabel="cross entropy (nats); circles: validation",
        ylim=(0, None),
    )
    axes.legend()
    axes.grid(alpha=0.3)


def _bytes(run: Lockstep, axes: Axes) -> None:
    for replica in run.replicas:
        if not replica.log.memories:
            continue
        colour, style, width = STYLES[replica.mode]
        curve = replica.log.memories[-1].saved
        axes.step(
            [at_s * 1e3 for at_s in curve.at_s],
            [nbytes / MIB for nbytes in curve.nbytes],
            where="post",
            color=colour,
            ls=style,
            lw=width,
            label=f"{replica.mode}: peak {curve.peak / MIB:.1f} MiB",
        )
    axes.set(
        title=f"{run.task.name.upper()}: bytes held by saved tensors in one step",
        xlabel="time in the step (ms, slowed by the measuring hooks)",
        ylabel="saved tensors (MiB)",
        ylim=(0, None),
    )
    axes.legend()
    axes.grid(alpha=0.3)


def _time_against_memory(rows: list[Row], axes: Axes) -> None:
    for row in rows:
        if row.peak_saved_bytes is None or row.step_time_rel is None:
            continue
        low, high = row.step_time_rel_quartiles or (row.step_time_rel, row.step_time_rel)
        spread = [[row.step_time_rel - low], [high - row.step_time_rel]]
        axes.errorbar(
            row.peak_saved_bytes / MIB,
            row.step_time_rel,
            yerr=spread,
            fmt="o",
            color=STYLES[row.mode][0],
            capsize=3,
            label=row.mode,
        )
    axes.set(
        title="step time against memory: down and left is better",
        xlabel="peak of saved tensors (MiB)",
        ylabel="step time / off's, with quartiles",
        xlim=(0, None),
    )
    if axes.containers:
        axes.legend()
    axes.grid(alpha=0.3)
