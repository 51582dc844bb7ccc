"""`python -m bench workloads`: models of other packages in every way, held bytes and step time."""

from __future__ import annotations

import functools
import importlib
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console

from bench.frameworks import report
from bench.frameworks.catalogue import SETS, WORKLOADS
from bench.frameworks.measure import N_SETTLING, PLAIN, WAYS, Counted, Row, measure
from bench.frameworks.models.workload import FULL, QUICK
from cswap.experiments.files.environment import version_of
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import N_THREADS, Again, names, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.frameworks.models.workload import Workload

STEPS: Final = 25
SECONDS: Final = 90.0
QUICK_STEPS: Final = 2
VERSION: Final = 2
FOLDER: Final = Path("bench/results/cpu")
OUT: Final = {"second": FOLDER / "workloads-second.json"}
"""Default result files of sets; of any other choice it is the first set's."""
PACKAGES: Final = (
    *("transformers", "accelerate", "timm", "torchvision", "torch-geometric", "diffusers", "peft"),
)
"""Whose versions are recorded."""


def main(
    workloads: Annotated[
        str, typer.Option(help=f"The first set, the second, or some of {', '.join(WORKLOADS)}.")
    ] = "first",
    ways: Annotated[
        str, typer.Option(help="Some of the ways, comma-separated; plain is always one.")
    ] = ",".join(WAYS),
    steps: Annotated[int | None, typer.Option(help="Fewest counted steps of each.", min=1)] = None,
    seconds: Annotated[
        float | None,
        typer.Option(help="Least time of a workload's counted steps, all ways together.", min=0),
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Result file (JSON).")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="Small models, a few steps.")] = False,
    again: Again = False,
) -> None:
    """Train models of transformers, timm, PyG, diffusers and PEFT in every way.

    A package that is not installed is a row that says so. An interrupted run goes on when the same
    command is repeated. Short steps are counted more often: a busy machine disturbs each of them
    more.
    """
    torch.set_num_threads(N_THREADS)
    settings: dict[str, Any] = {
        "workloads": names("--workloads", _without_sets(workloads), (*SETS, *WORKLOADS)),
        "ways": [PLAIN, *(w for w in names("--ways", ways, WAYS) if w != PLAIN)],
        "steps": steps or (QUICK_STEPS if quick else STEPS),
        "seconds": seconds if seconds is not None else (0.0 if quick else SECONDS),
        "quick": quick,
    }
    out = out or OUT.get(workloads, FOLDER / "workloads.json")
    writable_file(out)
    console = Console()
    partial = Partial(out, kind="workloads", version=VERSION, settings=settings, again=again)
    partial.document["packages"] = {name: version_of(name) for name in PACKAGES}
    parts = {name: functools.partial(_of_one, name, settings) for name in settings["workloads"]}
    n_steps = None if settings["seconds"] else settings["steps"] + N_SETTLING
    rows = partial.rows_of_parts(parts, n_steps, console)
    document = partial.finish(rows=rows)
    terminal.show(report.table(document), drop=report.DROPPED, console=console)
    console.print(literal(report.summary(document)), soft_wrap=True)
    console.print(literal(f"Written: {out}"), soft_wrap=True)


def _without_sets(text: str) -> str:
    # Names of sets, replaced by those of their workloads.
    parts = [part.strip() for part in text.split(",")]
    return ",".join([name for part in parts for name in SETS.get(part, (part,))])


def _of_one(
    name: str, settings: dict[str, Any], on_step: Callable[[], object]
) -> list[dict[str, Any]]:
    package, build = WORKLOADS[name]
    scale = QUICK if settings["quick"] else FULL
    try:
        importlib.import_module(package)
    except Exception as error:  # a package of another torch may raise anything
        why = "is not installed" if isinstance(error, ModuleNotFoundError) else "cannot be imported"
        return [_failed(name, f"{package} {why}")]

    def make() -> Workload:
        return build(scale)

    try:
        counted = Counted(settings["steps"], settings["seconds"])
        return measure(name, make, settings["ways"], counted, on_step)
    except Exception as error:
        text = (str(error).splitlines() or [""])[0][:200]
        return [_failed(name, f"cannot run ({type(error).__name__}: {text})")]


def _failed(name: str, why: str) -> dict[str, Any]:
    return asdict(Row(name, PLAIN, failure=why))
