"""`python -m bench codecs`: ratio and speed of every codec, against memcpy.

On recorded tensors, on synthetic ones that sweep over sparsity, values and sizes, or on your own.
"""

from __future__ import annotations

import functools
import shlex
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from cswap.codecs.registry import get_codec
from cswap.codecs.tiled import all_threads
from cswap.errors import ConfigError, UnsupportedError
from cswap.experiments.codecs import tables as codec_report
from cswap.experiments.codecs.cases import FAMILIES, MIB, OWN, of_data_sets, recorded, synthetic
from cswap.experiments.codecs.contenders import measure, row_from
from cswap.experiments.codecs.plots import draw
from cswap.experiments.codecs.recorded import KINDS
from cswap.experiments.codecs.script_tensors import record as record_script
from cswap.experiments.codecs.totals import verdict
from cswap.experiments.codecs.user_tensors import load
from cswap.experiments.files.kinds import understood
from cswap.experiments.files.resumable import Partial
from cswap.experiments.host_memory import host_available_bytes
from cswap.experiments.options import (
    N_THREADS,
    Again,
    is_cswap_bench,
    names,
    needs,
    results_folder,
    writable_file,
)
from cswap.report import terminal
from cswap.report.terminal import literal
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from cswap.experiments.codecs.cases import Case
    from cswap.experiments.codecs.contenders import Row

FILE: Final = "codecs.json"
"""Name of a whole run's result file, in the program's folder of results."""

VERSION: Final = 2
"""Version of the result file. 1 had only recorded tensors, and rows without key, family and
zeros."""


def main(
    context: typer.Context,
    device: Annotated[str, typer.Option(help="Only 'cpu' for now.")] = "cpu",
    mib: Annotated[int, typer.Option(help="Size of each recorded data set, in MiB.")] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 7,
    out: Annotated[
        str,
        typer.Option(
            help=f"Result file (JSON); a whole run's default: {FILE}, in the folder of results."
        ),
    ] = "",
    families: Annotated[
        str, typer.Option(help=f"Some of {', '.join(FAMILIES)}; default: all.")
    ] = "",
    kinds: Annotated[str, typer.Option(help=f"Recorded kinds: some of {', '.join(KINDS)}.")] = "",
    threads: Annotated[
        int | None,
        typer.Option(help=f"For codecs and memcpy; default: {N_THREADS}, or 1 if quick."),
    ] = None,
    quick: Annotated[bool, typer.Option(help="Small and short, to see that it works.")] = False,
    codecs: Annotated[str, typer.Option(help="Only these, comma-separated; default: all.")] = "",
    tensors: Annotated[str, typer.Option(help="Measure on the tensors of this file.")] = "",
    script: Annotated[
        str, typer.Option("--record", help="On the tensors that this script's first step saves.")
    ] = "",
    plots_only: Annotated[
        bool, typer.Option("--plots-only", help="Draw the result file's pictures anew.")
    ] = False,
    again: Again = False,
    arguments: Annotated[
        list[str] | None, typer.Argument(help="After --: arguments of --record's script.")
    ] = None,
) -> None:
    """Measure ratio and speed of every codec on recorded and synthetic tensors, or on your own.

    Your own come from a file (--tensors, of torch, safetensors or numpy) or from a script (--record
    runs its first step and keeps what that saves: --record train.py -- --batch 8). `cswap bench`
    writes to cswap-results. `python -m bench` has a default result file for a whole run only:
    everything else is written only where --out says. Pictures lie beside the result file. An
    interrupted run goes on when the same command is repeated.
    """
    console = Console()
    given = arguments or []
    n_threads = (1 if quick else N_THREADS) if threads is None else threads
    whole = not (quick or families or kinds or codecs or tensors or script)
    default = results_folder(context) / FILE
    part = default.with_stem("codecs-own" if tensors or script else "codecs-part")
    path = Path(out) if out else default if whole else part if is_cswap_bench(context) else None
    if plots_only:
        _redraw(path or default, console)
        return
    settings: dict[str, Any] = {
        "families": names("--families", families, FAMILIES) if families else list(FAMILIES),
        "kinds": names("--kinds", kinds, KINDS) if kinds else list(KINDS),
        "codecs": _codec_names(codecs),
        "mib": mib,
        "rounds": rounds,
        "threads": n_threads,
        "quick": quick,
        "own": tensors or (shlex.join([script, *given]) if script else None),
    }
    if device != "cpu" or min(mib, rounds, n_threads) < 1:
        raise ConfigError("--device must be cpu; --mib, --rounds and --threads at least 1")
    if path is not None:
        writable_file(path)
    own = _own(tensors, script, given, families)
    torch.set_num_threads(n_threads)
    all_threads.cache_clear()
    partial = Partial(path, kind="codecs", version=VERSION, settings=settings, again=again)
    if partial.went_on:
        console.print(f"Going on: {partial.went_on} data sets were measured before.")
    if own is None:
        if "recorded" in settings["families"]:
            needs("bench codecs", "sklearn")
        console.print("Recording and preparing tensors ...")
        own = _cases(settings)
    document = _finished(own, partial, console)
    if path is not None:
        console.print(literal(f"Written: {path}"), soft_wrap=True)
        _draw(path, document, console)
    for line in verdict([row for row in document["rows"] if row["family"] == OWN]):
        console.print(literal(line), soft_wrap=True)


def _finished(cases: list[Case], partial: Partial, console: Console) -> dict[str, Any]:
    # Measured, written and shown.
    settings = partial.document["settings"]
    rows, skipped = _measure(cases, settings, partial, console)
    document = partial.finish(rows=[asdict(row) for row in rows], skipped=skipped)
    for table in codec_report.tables(rows, document, settings["threads"]):
        terminal.show(table, drop=codec_report.DROPPED, console=console)
    for what in skipped:
        console.print(literal(f"Skipped: {what}"))
    return document


def _codec_names(text: str) -> list[str]:
    found = [name.strip() for name in text.split(",") if name.strip()]
    for name in found:
        get_codec(name)
    return found


def _own(tensors: str, script: str, arguments: list[str], families: str) -> list[Case] | None:
    given = [
        option
        for option, value in (
            ("--tensors", tensors),
            ("--record", script),
            ("--families", families),
        )
        if value
    ]
    if len(given) > 1:
        raise ConfigError(f"{' and '.join(given)} exclude each other: give one of them.")
    if arguments and not script:
        raise ConfigError(f"{shlex.join(arguments)!r}: arguments are of a script; give --record.")
    if tensors:
        return of_data_sets(OWN, load(tensors))
    return of_data_sets(OWN, record_script(script, arguments)) if script else None


def _cases(settings: dict[str, Any]) -> list[Case]:
    quick, found = settings["quick"], []
    nbytes = (1 if quick else settings["mib"]) * MIB
    for family in settings["families"]:
        if family == "recorded":
            found += recorded(nbytes, quick=quick, kinds=tuple(settings["kinds"]))
        else:
            found += synthetic(family, quick=quick)
    return found


def _measure(
    cases: list[Case], settings: dict[str, Any], partial: Partial, console: Console
) -> tuple[list[Row], list[str]]:
    # Cases that do not fit into this machine's memory are recorded as skipped.
    rounds, only = 2 if settings["quick"] else settings["rounds"], tuple(settings["codecs"])
    rows: list[Row] = []
    skipped = []
    lines = Console(stderr=True, quiet=console.is_terminal)  # a pipe shows no bar
    with Progress(console=console, transient=True) as progress:
        for i, case in enumerate(progress.track(cases, description="measuring")):
            lines.print(literal(f"Measuring {i + 1} of {len(cases)}: {case.data}"), soft_wrap=True)
            free = host_available_bytes()
            if case.family == "sizes" and free is not None and case.needed_bytes > free:
                skipped.append(
                    f"{case.family} {case.data} of {case.nbytes} bytes: takes up to "
                    f"{case.needed_bytes} bytes of memory, {free} are free"
                )
                continue
            make = functools.partial(_rows, case, rounds, only)
            done = partial.part(f"{i} {case.family} {case.data} {case.nbytes}", make)
            rows += [row_from(row) for row in done]
    return rows, skipped


def _rows(case: Case, rounds: int, only: tuple[str, ...]) -> list[dict[str, Any]]:
    return [asdict(row) for row in measure(case, rounds, only)]


def _redraw(path: Path, console: Console) -> None:
    document = read_object(path, "--out")
    rows = document.get("rows")
    if not isinstance(rows, list) or not rows:
        raise ConfigError(f"--out {str(path)!r}: there is nothing in it to draw.")
    with understood(path):
        _draw(path, document, console)


def _draw(path: Path, document: dict[str, Any], console: Console) -> None:
    try:
        drawn = draw(document, path.parent, path.stem)
    except UnsupportedError as error:
        console.print(literal(f"No pictures: {error}"), soft_wrap=True)
        return
    for picture in drawn:
        console.print(literal(f"Written: {picture}"), soft_wrap=True)
