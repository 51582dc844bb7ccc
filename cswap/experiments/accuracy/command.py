"""`python -m bench accuracy`: train under every policy, compare over matched seeds, report."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console

from cswap.errors import ConfigError
from cswap.experiments.accuracy import confirm, margins, pilot, report
from cswap.experiments.accuracy.own_task import OwnTask
from cswap.experiments.accuracy.summary import summarise
from cswap.experiments.accuracy.sweep import sweep
from cswap.experiments.accuracy.tasks import STEPS, make
from cswap.experiments.accuracy.train import POLICIES, SETTLING
from cswap.experiments.accuracy.verdict import FEWEST_SEEDS
from cswap.experiments.files.environment import environment
from cswap.experiments.files.resumable import same_code, stored
from cswap.experiments.files.writing import write
from cswap.experiments.launchers import LOCAL, JobsOption, Launcher, LauncherOption
from cswap.experiments.options import (
    INTERRUPTED,
    is_cswap_bench,
    names,
    needs,
    results_folder,
    writable_folder,
)
from cswap.experiments.workloads.tasks import fitting
from cswap.experiments.workloads.user_data import load_data
from cswap.report import terminal
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.experiments.task import Task
    from cswap.experiments.workloads.data import Images, Text

MODELS: Final = tuple(STEPS)
SEEDS: Final = {"cnn": 5, "resnet": 5, "vit": 5, "gpt": 5}
"""Matched seeds."""

QUICK: Final = {"steps": 12, "seeds": 2}
FOLDER: Final = "accuracy"
"""Folder of the results, in the program's own."""
VERSION: Final = 2
_TYPES: Final = {"runs": list, "gradient_errors": dict, "models": dict, "environment": dict}


def main(
    context: typer.Context,
    models: Annotated[
        str, typer.Option(help=f"Some of {', '.join(MODELS)}; default: all that fit the data.")
    ] = "",
    policies: Annotated[
        str, typer.Option(help=f"Some of {', '.join(POLICIES)}; off is always one.")
    ] = ",".join(POLICIES),
    data: Annotated[
        str,
        typer.Option(help="torchvision:CLASS[:ROOT] or hf:NAME[:CONFIG]; nothing is downloaded."),
    ] = "",
    seeds: Annotated[
        int | None,
        typer.Option(
            help=f"Matched seeds, default: each model's own; fewer than {FEWEST_SEEDS} decide "
            "nothing.",
            min=1,
        ),
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps; default: each model's own.")] = None,
    margin: Annotated[
        str,
        typer.Option(
            help="Loss in nats that would not matter: NATS, or MODEL=NATS,... Default: the stated "
            "ones; there are none for other data or another number of steps."
        ),
    ] = "",
    out: Annotated[
        str,
        typer.Option(
            help=f"Folder of results and report; default: {FOLDER}, in the folder of results."
        ),
    ] = "",
    own_task: Annotated[
        str,
        typer.Option(
            "--task",
            help="Your own model and data: FILE.py:FUNCTION, a function that returns a Task.",
        ),
    ] = "",
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps, two seeds: decides nothing.")
    ] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Discard the results in the folder.")
    ] = False,
    only_pilot: Annotated[
        bool,
        typer.Option("--pilot", help="Only plain training from other seeds, for the margins."),
    ] = False,
    only_confirm: Annotated[
        bool,
        typer.Option("--confirm", help="Repeat the first steps; if bits agree, the results stand."),
    ] = False,
    launcher: LauncherOption = LOCAL,
    jobs: JobsOption = 1,
) -> None:
    """Accuracy against latency: off, lossless, bf16, int8, fp8, int4 on real data.

    On handwritten digits and Python sources, on your own data set (--data; give --out, too, so that
    its results do not replace those), or on your own model and data (--task). An interrupted run
    goes on when the same command is repeated.
    """
    torch.set_num_threads(1)  # the models are small: a second thread would make them slower
    launched = Launcher(launcher, jobs)
    console = Console(quiet=not launched.reports)
    n_steps = QUICK["steps"] if quick and steps is None else steps
    if data and not out:
        raise ConfigError(f"--data {data!r}: give --out FOLDER, too.")
    _check_steps(n_steps)
    chosen = names("--policies", policies, tuple(POLICIES))
    n_seeds = QUICK["seeds"] if quick and seeds is None else seeds
    subject = (
        _own(own_task, n_steps, data, models) if own_task else _known(data, models, n_steps, quick)
    )
    settings: dict[str, Any] = {
        "models": subject.models,
        "policies": ["off", *(p for p in chosen if p != "off")],
        "data": data,
        "seeds": {model: n_seeds or SEEDS.get(model, FEWEST_SEEDS) for model in subject.models},
        "steps": n_steps,
        "quick": quick,
        **subject.settings,
    }
    given = {**subject.margins, **margins.parse(margin, subject.models)}
    settings["margins"] = margins.stated(settings, given)
    folder = writable_folder(Path(out) if out else _default_folder(context, subject, quick=quick))
    if only_pilot:
        pilot.command(settings, folder, subject.make, launched, console)
    elif only_confirm:
        if not launched.stays_here:
            raise ConfigError(
                "--confirm repeats a few steps here: leave --launcher and --jobs out."
            )
        confirm.command(folder / "results.json", console)
    else:
        document = _finished(settings, folder, subject.make, launched, console, again=again)
        raise typer.Exit(0 if document["complete"] else INTERRUPTED)


@dataclass(frozen=True, slots=True)
class Subject:
    """The studied models.

    Attributes:
        models: their names.
        make: makes the task of one of them.
        settings: further settings that decide whether a run can be continued.
        margins: stated by the task itself, by model.
    """

    models: list[str]
    make: Callable[[str], Task]
    settings: dict[str, Any] = field(default_factory=dict)
    margins: dict[str, float] = field(default_factory=dict)


def _known(data: str, models: str, n_steps: int | None, quick: bool) -> Subject:
    needs("bench accuracy", "matplotlib", "scipy", *([] if data else ["sklearn"]))
    own = load_data(data, quick=quick) if data else None
    make_one = partial(make, quick=quick, n_steps=n_steps, data=own)
    return Subject(_models(models, own), make_one)


def _own(spec: str, n_steps: int | None, data: str, models: str) -> Subject:
    for option, value in (("--data", data), ("--models", models)):
        if value:
            raise ConfigError(f"--task and {option} exclude each other: give one of them.")
    needs("bench accuracy", "matplotlib", "scipy")
    source, task = OwnTask.first(spec, n_steps)
    # Another number of steps is another experiment: its margin must be stated anew.
    stated = {task.name: float(task.margin)} if task.margin and n_steps is None else {}
    about = {"file": spec, "sha256": source.sha256}
    return Subject([task.name], source, {"task": about}, stated)


def _default_folder(context: typer.Context, subject: Subject, *, quick: bool) -> Path:
    own = "task" in subject.settings
    if not is_cswap_bench(context):
        if own:
            raise ConfigError("--task: give --out FOLDER, too.")
        return results_folder(context) / FOLDER
    # A quick run must not replace a long one's results.
    parts = [FOLDER, *([subject.models[0]] if own else []), *(["quick"] if quick else [])]
    return results_folder(context) / "-".join(parts)


def _models(text: str, data: Images | Text | None) -> list[str]:
    known = MODELS if data is None else tuple(m for m in MODELS if m in fitting(data))
    return names("--models", text, known) if text else list(known)


def _finished(
    settings: dict[str, Any],
    folder: Path,
    maker: Callable[[str], Task],
    launcher: Launcher,
    console: Console,
    *,
    again: bool,
) -> dict[str, Any]:
    # Train, compare, write and show the results, also those of an interrupted run.
    document = _started(folder, settings, again=again)
    try:
        sweep(document, maker, launcher, console, lambda: write(folder / "results.json", document))
    except KeyboardInterrupt:
        console.print("Interrupted: the same command goes on from here.")
    document["summary"] = summarise(document)
    write(folder / "results.json", document)
    for path in report.write(document, folder):
        console.print(literal(f"Written: {path}"), soft_wrap=True)
    terminal.show(report.table(document), drop=report.DROPPED, console=console)
    return document


def _check_steps(steps: int | None) -> None:
    if steps is not None and steps <= SETTLING:
        raise ConfigError(f"--steps {steps}: the first {SETTLING} are not counted; give more.")


def _started(out: Path, settings: dict[str, Any], *, again: bool) -> dict[str, Any]:
    # An unfinished run of the same settings and the same code, or a new document.
    same = {"version": VERSION, "settings": settings}
    new: dict[str, Any] = {
        "kind": "accuracy",
        **same,
        "environment": environment("accuracy"),
        "runs": [],
        "gradient_errors": {},
        "models": {},
        "complete": False,
    }
    found = None if again else stored(out / "results.json", _TYPES, **same)
    return found if found is not None and same_code(found, new) else new
