"""`python -m bench inlined`: codecs inside of compiled graphs, against hooks between them."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console

from bench.inlined import report
from bench.inlined.measure import N_SETTLING, measure
from bench.workloads.tasks import make_task
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, Again, names, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

MODELS: Final = ("gpt", "vit", "cnn")
STEPS: Final = 15
QUICK_STEPS: Final = 2
VERSION: Final = 1
DEFAULT_OUT: Final = Path("bench/results/cpu/inlined.json")


def main(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = ",".join(MODELS),
    steps: Annotated[int | None, typer.Option(help="Counted steps of each way.", min=1)] = None,
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = DEFAULT_OUT,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, a few steps.")] = False,
    again: Again = False,
) -> None:
    """Train compiled models with `cswap.inlined`, and with hooks between the graphs.

    An interrupted run goes on when the same command is repeated.
    """
    torch.set_num_threads(N_THREADS)
    settings: dict[str, Any] = {
        "models": names("--models", models, MODELS),
        "steps": steps or (QUICK_STEPS if quick else STEPS),
        "quick": quick,
    }
    writable_file(out)
    console = Console()
    partly = Partial(out, kind="inlined", version=VERSION, settings=settings, again=again)
    n_steps = settings["steps"]
    parts = {
        name: partial(measure, make_task(name, quick=quick, n_steps=n_steps), n_steps)
        for name in settings["models"]
    }
    document = partly.finish(rows=partly.rows_of_parts(parts, N_SETTLING + n_steps, console))
    terminal.show(report.table(document), drop=("step ms",), console=console)
    console.print(literal(f"Written: {out}"))
