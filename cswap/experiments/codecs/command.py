"""`cswap bench codecs`: ratio and speed of every codec on one's own tensors, against memcpy."""

from __future__ import annotations

import shlex
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from cswap.errors import ConfigError
from cswap.experiments.codecs import plots, tables
from cswap.experiments.codecs.measuring import (
    VERSION,
    codec_names,
    measured,
    say_what_is_written,
    set_threads,
)
from cswap.experiments.codecs.script_tensors import record as record_script
from cswap.experiments.codecs.totals import verdict
from cswap.experiments.codecs.user_tensors import load
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, RESULTS, Again, writable_file
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from cswap.experiments.codecs.case import Case

FILE: Final = RESULTS / "codecs-own.json"


def main(
    tensors: Annotated[str, typer.Option(help="Measure on the tensors of this file.")] = "",
    script: Annotated[
        str, typer.Option("--record", help="On the tensors that this script's first step saves.")
    ] = "",
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 7,
    threads: Annotated[int, typer.Option(help="For codecs and memcpy.", min=1)] = N_THREADS,
    codecs: Annotated[str, typer.Option(help="Only these, comma-separated; default: all.")] = "",
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = FILE,
    again: Again = False,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of --record's script.")
    ] = None,
) -> None:
    """Measure ratio and speed of every codec on your own tensors.

    They come from a file (--tensors, of torch, safetensors or numpy) or from a script (--record
    runs its first step and keeps what that saves: --record train.py -- --batch 8). A picture lies
    beside the result file. An interrupted run goes on when the same command is repeated.
    """
    console, given = Console(), arguments or []
    settings: dict[str, Any] = {
        "codecs": codec_names(codecs),
        "rounds": rounds,
        "threads": threads,
        "own": tensors or shlex.join([script, *given]),
    }
    writable_file(out)
    cases = _own(tensors, script, given)
    set_threads(threads)
    unfinished = Partial(out, kind="codecs", version=VERSION, settings=settings, again=again)
    rows = measured(cases, unfinished, rounds, settings["codecs"], console)
    document = unfinished.finish(rows=rows)
    for grid in tables.grids(document):
        grid.show(console)
    say_what_is_written(out, lambda: plots.draw(document, out.parent, out.stem), console)
    for line in verdict(rows):
        console.print(literal(line), soft_wrap=True)


def _own(tensors: str, script: str, arguments: list[str]) -> list[Case]:
    if tensors and script:
        raise ConfigError("--tensors and --record exclude each other: give one of them.")
    if arguments and not script:
        raise ConfigError(f"{shlex.join(arguments)!r}: arguments are of a script; give --record.")
    if not (tensors or script):
        raise ConfigError("bench codecs: give --record train.py, or --tensors saved.pt.")
    return load(tensors) if tensors else record_script(script, arguments)
