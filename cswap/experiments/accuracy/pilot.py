"""Pilot runs: plain training from seeds of its own, to learn how much the seed alone changes.

They give the margin of a comparison, the mean loss that would not matter, before any policy is
trained: half the standard deviation of the validation loss over seeds. So a policy that costs one
standard deviation of the seeds lies beyond the margin.
"""

from __future__ import annotations

import math
import statistics
from functools import partial
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.experiments.accuracy.train import repeatable, train
from cswap.experiments.files.resumable import Partial
from cswap.experiments.grid import Grid
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.experiments.accuracy.study import Study
    from cswap.experiments.task import Task

VERSION: Final = 1
FILE: Final = "pilot.json"

SHARE: Final = 0.5
"""Margin as a share of the seeds' standard deviation."""

PILOT_SEEDS: Final = range(100, 108)
"""The comparison does not use them."""


def margin_of(losses: Sequence[float]) -> float:
    """The margin that pilot runs with these validation losses give, rounded to two digits.

    >>> margin_of([0.30, 0.34, 0.28, 0.33, 0.31])
    0.012
    """
    spread = SHARE * statistics.stdev(losses)
    return round(spread, 1 - math.floor(math.log10(spread))) if spread else 0.0


def command(study: Study, *, again: bool = False) -> None:
    """Train every model from `PILOT_SEEDS`, write the file and show it.

    Args:
        study: the task, and its options.
        again: do not continue an unfinished run.
    """
    asked = {k: v for k, v in study.settings.items() if k in ("models", "steps", "quick", "task")}
    out = study.folder / FILE
    partial_ = Partial(out, kind="accuracy pilot", version=VERSION, settings=asked, again=again)
    models = asked["models"]
    wanted = {f"{model} {seed}": (model, seed) for model in models for seed in PILOT_SEEDS}
    runs = partial_.parts(wanted, partial(_one, study.maker), study.jobs, study.console)
    rows = [_row(model, [r for r in runs if r["model"] == model]) for model in models]
    document = partial_.finish(runs=runs, rows=rows)
    for grid in grids(document):
        grid.show(study.console)
    study.console.print(literal(f"Written: {out}"), soft_wrap=True)


def _one(
    maker: Callable[[str], Task],
    part: tuple[str, int],
    on_step: Callable[[], object] = lambda: None,
) -> dict[str, Any]:
    torch.set_num_threads(1)  # as the command, in another process, too
    model, seed = part
    task = maker(model)
    with repeatable():
        found = train(task, ["off"], seed, on_step)["off"].finish()
    return {
        "model": model,
        "seed": seed,
        "n_steps": task.n_steps,
        "first_loss": found.losses[0],
        "validation_loss": found.validation_loss,
        "accuracy": found.accuracy,
    }


def _row(model: str, runs: list[dict[str, Any]]) -> dict[str, Any]:
    losses = [run["validation_loss"] for run in runs]
    return {
        "model": model,
        "seeds": len(runs),
        "validation_loss": statistics.fmean(losses),
        "spread": statistics.stdev(losses),
        "accuracy": statistics.fmean(run["accuracy"] for run in runs),
        "margin": margin_of(losses),
    }


def grids(document: dict[str, Any]) -> list[Grid]:
    """The table of a pilot's file."""
    headings = ("model", "seeds", "val. loss", "spread (SD)", "accuracy %", "margin")
    rows = [
        (
            row["model"],
            str(row["seeds"]),
            f"{row['validation_loss']:.4f}",
            f"{row['spread']:.4f}",
            f"{100 * row['accuracy']:.1f}",
            f"{row['margin']:g}",
        )
        for row in document["rows"]
    ]
    return [Grid(headings, rows, "Plain training from other seeds")]
