"""`python -m bench swap`: step time and memory of every way to swap, against none and memcpy."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console

from bench.swap import report
from bench.swap.measure import train
from bench.swap.stack import stack_task
from bench.workloads.methods import OFF, ON_CPU
from bench.workloads.tasks import make_task
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, Again, names, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from cswap.experiments.task import Task

MODELS: Final = ("cnn", "gpt", "vit", "stack")
STEPS: Final = 30
QUICK_STEPS: Final = 6
STACK_MIB: Final = "32,128"
QUICK_MIB: Final = "8"
VERSION: Final = 1
DEFAULT_OUT: Final = Path("bench/results/cpu/swap.json")


def main(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = ",".join(MODELS),
    methods: Annotated[
        str, typer.Option(help="Some of the ways, comma-separated; off is always one.")
    ] = ",".join(ON_CPU),
    mib: Annotated[
        str | None, typer.Option(help=f"MiB that stacks save; default: {STACK_MIB}.")
    ] = None,
    steps: Annotated[int | None, typer.Option(help="Steps of each model.", min=2)] = None,
    out: Annotated[
        Path, typer.Option(help="Result file (JSON); the picture is beside it.")
    ] = DEFAULT_OUT,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, a few steps.")] = False,
    again: Again = False,
) -> None:
    """Train with every way to swap or recompute on this CPU, steps in turns.

    An interrupted run goes on when the same command is repeated.
    """
    torch.set_num_threads(N_THREADS)
    settings: dict[str, Any] = {
        "models": names("--models", models, MODELS),
        "methods": [OFF, *(m for m in names("--methods", methods, tuple(ON_CPU)) if m != OFF)],
        "mib": _sizes(mib or (QUICK_MIB if quick else STACK_MIB)),
        "steps": steps or (QUICK_STEPS if quick else STEPS),
        "quick": quick,
    }
    writable_file(out)
    console = Console()
    partial = Partial(out, kind="swap", version=VERSION, settings=settings, again=again)
    tasks = {task.name: task for task in _tasks(settings)}
    facts = {name: {"n_steps": task.n_steps, **task.facts} for name, task in tasks.items()}
    partial.document["models"] = facts
    parts = {
        name: lambda on_step, task=task: train(task, settings["methods"], on_step)
        for name, task in tasks.items()
    }
    rows = partial.rows_of_parts(parts, settings["steps"], console)
    document = partial.finish(rows=rows)
    terminal.show(report.table(document), drop=report.DROPPED, console=console)
    report.draw(document, out.with_suffix(".png"))
    console.print(literal(f"Written: {out}, {out.with_suffix('.png')}"))


def _sizes(text: str) -> list[int]:
    try:
        sizes = [int(size) for size in text.split(",")]
    except ValueError as error:
        raise typer.BadParameter(f"--mib {text!r}: must be whole numbers, as in 32,128.") from error
    if min(sizes) < 1:
        raise typer.BadParameter(f"--mib {text!r}: each must be at least 1.")
    return sizes


def _tasks(settings: dict[str, Any]) -> list[Task]:
    quick, steps = settings["quick"], settings["steps"]
    found = [make_task(m, quick=quick, n_steps=steps) for m in settings["models"] if m != "stack"]
    if "stack" in settings["models"]:
        found += [stack_task(mib, n_steps=steps) for mib in settings["mib"]]
    return found
