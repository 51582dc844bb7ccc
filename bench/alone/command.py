"""`python -m bench alone`: every way in a process of its own, with the system's fresh pages."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import typer
from rich.console import Console

from bench.alone import report
from bench.alone.measure import SETTLING, measure
from bench.fit.models import MODELS
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, Again, names, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

STEPS: Final = 30
QUICK_STEPS: Final = 3
VERSION: Final = 1
DEFAULT_OUT: Final = Path("bench/results/cpu/alone.json")


def main(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = ",".join(MODELS),
    steps: Annotated[int | None, typer.Option(help="Counted steps of each way.", min=2)] = None,
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = DEFAULT_OUT,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, a few steps.")] = False,
    again: Again = False,
) -> None:
    """Train in every way, each alone in a process: step times, fresh pages, the process's memory.

    Where ways share a process, as in `bench swap`, they share its heap, too. An interrupted run
    goes on when the same command is repeated.
    """
    settings: dict[str, Any] = {
        "models": names("--models", models, MODELS),
        "steps": steps or (QUICK_STEPS if quick else STEPS),
        "settling": 0 if quick else SETTLING,
        "quick": quick,
    }
    writable_file(out)
    console = Console()
    partly = Partial(out, kind="alone", version=VERSION, settings=settings, again=again)
    fixed = {"settling": settings["settling"], "quick": quick, "threads": N_THREADS}
    parts = {
        name: lambda on_step, name=name: measure(
            name, rounds=settings["steps"], on_step=on_step, **fixed
        )
        for name in settings["models"]
    }
    document = partly.finish(rows=partly.rows_of_parts(parts, settings["steps"], console))
    terminal.show(report.table(document), drop=report.DROPPED, console=console)
    console.print(literal(f"Written: {out}"))
