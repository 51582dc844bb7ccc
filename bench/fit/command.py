"""`python -m bench fit`: memory goals of five models, against checkpointing at the same memory."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console

from bench.fit import report
from bench.fit.measure import measure
from bench.fit.models import MODELS
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, Again, names, writable_file
from cswap.report.terminal import literal

SHARES: Final = (0.75, 0.5, 0.35)
ROUNDS: Final = 30
LEAST_S: Final = 60.0
"""Seconds that the counted steps of a model take at least: short steps need more of them, since a
shared machine disturbs them by as much, and the bar is a quotient of two small differences."""

QUICK_ROUNDS: Final = 4
VERSION: Final = 1
DEFAULT_OUT: Final = Path("bench/results/cpu/fit.json")


def main(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = ",".join(MODELS),
    rounds: Annotated[
        int | None,
        typer.Option(help=f"Counted steps; default: {ROUNDS}, and {LEAST_S:.0f} s.", min=2),
    ] = None,
    out: Annotated[
        Path, typer.Option(help="Result file (JSON); the picture is beside it.")
    ] = DEFAULT_OUT,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, a few steps.")] = False,
    again: Again = False,
) -> None:
    """Hold 75, 50 and 35 % of the saved bytes of five models on this CPU.

    An interrupted run goes on when the same command is repeated.
    """
    torch.set_num_threads(N_THREADS)
    settings: dict[str, Any] = {
        "models": names("--models", models, MODELS),
        "shares": list(SHARES),
        "rounds": rounds or (QUICK_ROUNDS if quick else ROUNDS),
        "least_s": 0.0 if rounds or quick else LEAST_S,
        "quick": quick,
    }
    writable_file(out)
    console = Console()
    partial = Partial(out, kind="fit", version=VERSION, settings=settings, again=again)
    same = {key: settings[key] for key in ("shares", "rounds", "least_s", "quick")}
    parts = {
        name: lambda on_step, name=name: measure(name, on_step=on_step, **same)
        for name in settings["models"]
    }
    known = None if settings["least_s"] else settings["rounds"]
    rows = partial.rows_of_parts(parts, known, console)
    document = partial.finish(rows=report.with_quotients(rows))
    console.print(report.table(document))
    report.draw(document, out.with_suffix(".png"))
    console.print(literal(f"Written: {out}, {out.with_suffix('.png')}"))
