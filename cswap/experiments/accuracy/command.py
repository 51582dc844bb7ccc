"""`cswap bench accuracy`: train one's own task under every policy, compare over matched seeds."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console

from cswap.errors import ConfigError
from cswap.experiments.accuracy import pilot, study, sweep
from cswap.experiments.accuracy.own_task import OwnTask
from cswap.experiments.accuracy.train import POLICIES, SETTLING
from cswap.experiments.accuracy.verdict import FEWEST_SEEDS
from cswap.experiments.options import (
    RESULTS,
    Again,
    JobsOption,
    names,
    needs,
    writable_folder,
)

Policies = Annotated[str, typer.Option(help=f"Some of {', '.join(POLICIES)}; off is always one.")]
Seeds = Annotated[
    int | None,
    typer.Option(help=f"Matched seeds; fewer than {FEWEST_SEEDS} decide nothing.", min=1),
]
Quick = Annotated[bool, typer.Option("--quick", help="A few steps, two seeds: decides nothing.")]
Pilot = Annotated[
    bool, typer.Option("--pilot", help="Only plain training from other seeds, for the margin.")
]
ALL: Final = ",".join(POLICIES)


def main(
    task: Annotated[
        str,
        typer.Option(help="Your model and data: FILE.py:FUNCTION, a function that returns a Task."),
    ] = "",
    policies: Policies = ALL,
    seeds: Seeds = None,
    steps: Annotated[int | None, typer.Option(help="Steps; default: the task's own.")] = None,
    margin: Annotated[
        float | None,
        typer.Option(
            help="Loss that would not matter. Default: the task's, for its own number of steps."
        ),
    ] = None,
    out: Annotated[
        str,
        typer.Option(help=f"Folder of results and report; default: {RESULTS}/accuracy-NAME."),
    ] = "",
    quick: Quick = False,
    again: Again = False,
    only_pilot: Pilot = False,
    jobs: JobsOption = 1,
) -> None:
    """Accuracy against latency of your own model: off, lossless, bf16, int8, fp8, int4.

    An interrupted run goes on when the same command is repeated.
    """
    if not task:
        raise ConfigError("bench accuracy: name your task: --task my.py:make_task.")
    torch.set_num_threads(1)  # as in other processes: sums in the same order
    n_steps = study.QUICK["steps"] if quick and steps is None else steps
    if n_steps is not None and n_steps <= SETTLING:
        raise ConfigError(f"--steps {n_steps}: the first {SETTLING} are not counted; give more.")
    if margin is not None and not 0 < margin < float("inf"):
        raise ConfigError(f"--margin {margin}: must be above 0, such as 0.01.")
    chosen = names("--policies", policies, tuple(POLICIES))
    needs("bench accuracy", "matplotlib", "scipy")
    source = OwnTask.of(task, n_steps)
    own = source()
    # Another number of steps is another experiment: its margin must be stated anew.
    stated = margin or (own.margin if n_steps is None else None)
    settings = study.settings_of(
        {own.name: stated},
        chosen,
        seeds,
        steps=n_steps,
        quick=quick,
        task={"file": task, "sha256": source.sha256},
    )
    # A quick run must not replace a long one's results.
    folder = RESULTS / f"accuracy-{own.name}{'-quick' if quick else ''}"
    experiment = study.Study(
        settings,
        source,
        writable_folder(Path(out) if out else folder),
        jobs,
        Console(),
    )
    if only_pilot:
        pilot.command(experiment, again=again)
    else:
        sweep.compare(experiment, again=again)
