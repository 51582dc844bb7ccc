"""`python -m bench accuracy`: as `cswap bench accuracy`, on the tasks of `bench.accuracy.tasks`."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Final

import torch
import typer
from rich.console import Console

from bench.accuracy.tasks import MARGINS, STEPS, make
from cswap.experiments.accuracy import pilot, study, sweep
from cswap.experiments.accuracy.command import ALL, Pilot, Policies, Quick, Seeds
from cswap.experiments.accuracy.train import POLICIES
from cswap.experiments.options import Again, JobsOption, names, needs, writable_folder

FOLDER: Final = Path("bench/results/cpu/accuracy")


def main(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(STEPS)}.")] = ",".join(STEPS),
    policies: Policies = ALL,
    seeds: Seeds = None,
    out: Annotated[Path, typer.Option(help="Folder of results and report.")] = FOLDER,
    quick: Quick = False,
    again: Again = False,
    only_pilot: Pilot = False,
    jobs: JobsOption = 1,
) -> None:
    """Accuracy against latency on handwritten digits and Python sources.

    An interrupted run goes on when the same command is repeated.
    """
    torch.set_num_threads(1)  # the models are small: a second thread would make them slower
    needs("bench accuracy", "matplotlib", "scipy", "sklearn", extra="bench,dev")
    chosen = names("--models", models, tuple(STEPS))
    n_steps = study.QUICK["steps"] if quick else None
    experiment = study.Study(
        study.settings_of(
            {model: None if quick else MARGINS[model] for model in chosen},
            names("--policies", policies, tuple(POLICIES)),
            seeds,
            steps=n_steps,
            quick=quick,
        ),
        partial(make, n_steps=n_steps),
        writable_folder(out),
        jobs,
        Console(),
    )
    if only_pilot:
        pilot.command(experiment, again=again)
    else:
        sweep.compare(experiment, again=again)
