"""`python -m bench demo`: two models, trained without cswap, with it, and with checkpointing."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console

from bench.demo import report
from bench.workloads.methods import DEMO, OFF
from bench.workloads.tasks import make_task
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, Again, names, needs, writable_folder
from cswap.report import terminal
from cswap.report.terminal import literal

MODELS: Final = ("cnn", "gpt", "gpt6")
DEFAULT_MODELS: Final = "cnn,gpt"
"""gpt6 takes longer than the other two together."""

DEFAULT_MODES: Final = "off,remat,int8,checkpoint"
STEPS: Final = 15
"""Training steps of a model: enough to see it learn, in a minute."""

VERSION: Final = 2


def main(
    out: Annotated[Path, typer.Option(help="Folder for results.json and results.png.")] = Path(
        "demo-out"
    ),
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = DEFAULT_MODELS,
    modes: Annotated[
        str, typer.Option(help=f"Some of {', '.join(DEMO)}; off is always one.")
    ] = DEFAULT_MODES,
    steps: Annotated[int | None, typer.Option(help="Training steps per model.", min=1)] = None,
    quick: Annotated[bool, typer.Option(help="Tiny models, a few steps: does it work?")] = False,
    again: Again = False,
) -> None:
    """Train a CNN and a GPT on the CPU: off, with cswap, and with torch's checkpointing.

    An interrupted run goes on when the same command is repeated.
    """
    needs("bench demo", "matplotlib", "sklearn", extra="bench,dev")
    from bench.swap.measure import MEMCPY, train
    from bench.swap.report import draw

    torch.set_num_threads(N_THREADS)
    asked = names("--modes", modes, tuple(DEMO))
    settings: dict[str, Any] = {
        "models": names("--models", models, MODELS),
        "methods": [OFF, *(mode for mode in DEMO if mode in asked and mode != OFF)],
        "steps": steps or (None if quick else STEPS),
        "quick": quick,
    }
    file = writable_folder(out) / "results.json"
    console = Console()
    unfinished = Partial(file, kind="demo", version=VERSION, settings=settings, again=again)
    tasks = [make_task(m, quick=quick, n_steps=settings["steps"]) for m in settings["models"]]
    unfinished.document["models"] = {t.name: {"n_steps": t.n_steps, **t.facts} for t in tasks}
    parts = {task.name: partial(train, task, settings["methods"]) for task in tasks}
    rows = unfinished.rows_of_parts(parts, settings["steps"], console)
    document = unfinished.finish(rows=[row for row in rows if row["method"] != MEMCPY])
    terminal.show(report.table(document), drop=report.DROPPED, console=console)
    draw(document, file.with_suffix(".png"))
    console.print(literal(f"Written: {file}, {file.with_suffix('.png')}"), soft_wrap=True)
    for line in report.conclusions(document["rows"]):
        console.print(f"[bold]{line}[/]", soft_wrap=True)
