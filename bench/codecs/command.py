"""`python -m bench codecs`: ratio and speed of every codec, against memcpy, on our own data.

On recorded tensors, and on synthetic ones that sweep over sparsity, values and sizes.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from bench.codecs import plots, tables
from bench.codecs.recorded import record
from bench.codecs.synthetic import FAMILIES, MIB, synthetic
from bench.workloads.host_memory import host_available_bytes
from cswap.experiments.codecs.measuring import (
    VERSION,
    codec_names,
    measured,
    say_what_is_written,
    set_threads,
)
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, Again, names, needs, writable_file
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from cswap.experiments.codecs.case import Case

FILE: Final = Path("bench/results/cpu/codecs.json")


def main(
    mib: Annotated[int, typer.Option(help="Size of each recorded data set, in MiB.", min=1)] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 7,
    out: Annotated[
        Path | None, typer.Option(help=f"Result file (JSON); a whole run's default: {FILE}.")
    ] = None,
    families: Annotated[str, typer.Option(help=f"Some of {', '.join(FAMILIES)}.")] = ",".join(
        FAMILIES
    ),
    threads: Annotated[
        int | None,
        typer.Option(help=f"For codecs and memcpy; default: {N_THREADS}, or 1 if quick.", min=1),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small and short, to see that it works.")] = False,
    codecs: Annotated[str, typer.Option(help="Only these, comma-separated; default: all.")] = "",
    again: Again = False,
) -> None:
    """Measure ratio and speed of every codec on recorded and synthetic tensors.

    A part of a run is written only where --out says. Pictures lie beside the result file. An
    interrupted run goes on when the same command is repeated.
    """
    console = Console()
    settings: dict[str, Any] = {
        "families": names("--families", families, FAMILIES),
        "codecs": codec_names(codecs),
        "mib": mib,
        "rounds": 2 if quick else rounds,
        "threads": threads or (1 if quick else N_THREADS),
        "quick": quick,
    }
    if out is None and settings["families"] == list(FAMILIES) and not (quick or codecs):
        out = FILE
    if out is not None:
        writable_file(out)
    set_threads(settings["threads"])
    unfinished = Partial(out, kind="codecs", version=VERSION, settings=settings, again=again)
    console.print("Recording and preparing tensors ...")
    cases, skipped = _that_fit(_cases(settings))
    rows = measured(cases, unfinished, settings["rounds"], settings["codecs"], console)
    document = unfinished.finish(rows=rows, skipped=skipped)
    for grid in tables.grids(document):
        grid.show(console, drop=tables.DROPPED)
    for reason in skipped:
        console.print(literal(f"Skipped: {reason}"))
    if out is not None:
        draw = partial(plots.draw, document, out.parent, out.stem)
        say_what_is_written(out, draw, console)


def _cases(settings: dict[str, Any]) -> list[Case]:
    quick, found = settings["quick"], []
    for family in settings["families"]:
        if family == "recorded":
            needs("bench codecs", "sklearn", extra="dev")
            found += record((1 if quick else settings["mib"]) * MIB, quick=quick)
        else:
            found += synthetic(family, quick=quick)
    return found


def _that_fit(cases: list[Case]) -> tuple[list[Case], list[str]]:
    # The cases of sizes that fit into this machine's memory, and a line on each of the others.
    free, fitting, skipped = host_available_bytes(), [], []
    for case in cases:
        # Tensor, buffers, an encoding per codec; making the tensor takes some copies, too.
        needed = case.nbytes * (5 + len(case.codecs))
        if case.family == "sizes" and free is not None and needed > free:
            skipped.append(
                f"{case.family} {case.data} of {case.nbytes} bytes: takes up to {needed} bytes of "
                f"memory, {free} are free"
            )
        else:
            fitting.append(case)
    return fitting, skipped
