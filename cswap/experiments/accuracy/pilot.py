"""Pilot runs: plain training from seeds of its own, to learn how much the seed alone changes.

The margins of the comparison come from here (`cswap.experiments.accuracy.margins`), before any
policy is trained.
"""

from __future__ import annotations

import functools
import statistics
from typing import TYPE_CHECKING, Any, Final

import torch
from rich.table import Table

from cswap.experiments.accuracy.margins import PILOT_SEEDS, margin_of
from cswap.experiments.accuracy.train import repeatable, train
from cswap.experiments.files.resumable import Partial
from cswap.report import terminal
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from rich.console import Console

    from cswap.experiments.launchers import Launcher
    from cswap.experiments.task import Task

VERSION: Final = 1
FILE: Final = "pilot.json"


def command(
    settings: dict[str, Any],
    folder: Path,
    maker: Callable[[str], Task],
    launcher: Launcher,
    console: Console,
) -> None:
    """Train every model from `PILOT_SEEDS`, write the file and show it.

    An unfinished run in the folder is continued.

    Args:
        settings: settings of the command: models, data, steps, quick, and task if it is a user's.
        folder: folder of the file.
        maker: makes the task of a model.
        launcher: runs the trainings.
        console: shows progress and the table.
    """
    keys = ("models", "data", "steps", "quick", "task")
    asked = {key: settings[key] for key in keys if key in settings}
    partial = Partial(folder / FILE, kind="accuracy pilot", version=VERSION, settings=asked)
    wanted = {
        f"{model} {seed}": (model, seed) for model in settings["models"] for seed in PILOT_SEEDS
    }
    runs = partial.parts(wanted, functools.partial(_one, maker), launcher, console)
    rows = [_row(model, [r for r in runs if r["model"] == model]) for model in settings["models"]]
    partial.finish(runs=runs, rows=rows)
    terminal.show(_table(rows), console=console)
    console.print(literal(f"Written: {folder / FILE}"), soft_wrap=True)


def _one(maker: Callable[[str], Task], part: tuple[str, int]) -> dict[str, Any]:
    torch.set_num_threads(1)  # as the command, in another process, too
    model, seed = part
    task = maker(model)
    with repeatable():
        found = train(task, ["off"], seed, lambda: None)["off"].finish()
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


def _table(rows: list[dict[str, Any]]) -> Table:
    table = Table(title="Plain training from other seeds")
    for heading in ("model", "seeds", "val. loss", "spread (SD)", "accuracy %", "margin"):
        table.add_column(heading)
    for row in rows:
        table.add_row(
            row["model"],
            str(row["seeds"]),
            f"{row['validation_loss']:.4f}",
            f"{row['spread']:.4f}",
            f"{100 * row['accuracy']:.1f}",
            f"{row['margin']:g}",
        )
    return table
