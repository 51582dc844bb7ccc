"""`python -m bench accuracy`: train under every policy, compare over matched seeds, report."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from bench.accuracy import report
from bench.accuracy.gradients import errors
from bench.accuracy.summary import summarise
from bench.accuracy.train import POLICIES, SETTLING, train
from bench.demo.settings import N_THREADS
from bench.demo.summary import write
from bench.files.environment import environment
from bench.files.resumable import stored
from bench.options import INTERRUPTED, names, writable_folder
from bench.workloads.tasks import fitting, make_task
from bench.workloads.user_data import load_data
from cswap.errors import ConfigError
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from bench.workloads.data import Images, Text
    from bench.workloads.tasks import Task

MODELS: Final = ("cnn", "vit", "gpt")
SEEDS: Final = 3
QUICK: Final = {"steps": 12, "seeds": 2}
DEFAULT_OUT: Final = Path("bench/results/cpu/accuracy")
VERSION: Final = 1
_TYPES: Final = {"runs": list, "gradient_errors": dict, "models": dict}


def main(
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
    seeds: Annotated[int, typer.Option(help="Matched seeds.", min=1)] = SEEDS,
    steps: Annotated[int | None, typer.Option(help="Steps; default: each model's own.")] = None,
    out: Annotated[
        str, typer.Option(help=f"Folder of results and report; default: {DEFAULT_OUT}.")
    ] = "",
    quick: Annotated[bool, typer.Option("--quick", help="Small models, two seeds.")] = False,
    again: Annotated[
        bool, typer.Option("--again", help="Keep nothing of what is in the folder.")
    ] = False,
) -> None:
    """Accuracy against latency: off, lossless, bf16, int8, fp8, int4 on real data.

    On handwritten digits and Python sources, or on your own data set (--data; give --out, too, so
    that its results do not replace those).
    """
    # Its models are so small that a second thread costs more than it brings.
    torch.set_num_threads(1 if quick else N_THREADS)
    console = Console()
    n_steps = QUICK["steps"] if quick and steps is None else steps
    if data and not out:
        raise ConfigError(f"--data {data!r}: give --out FOLDER, too.")
    _check_steps(n_steps)
    own = load_data(data, quick=quick) if data else None
    chosen = names("--policies", policies, tuple(POLICIES))
    settings = {
        "models": _models(models, own),
        "policies": ["off", *(p for p in chosen if p != "off")],
        "data": data,
        "seeds": QUICK["seeds"] if quick and seeds == SEEDS else seeds,
        "steps": n_steps,
        "quick": quick,
    }
    folder = writable_folder(Path(out) if out else DEFAULT_OUT)
    document = _finished(settings, folder, own, console, again=again)
    raise typer.Exit(0 if document["complete"] else INTERRUPTED)


def _models(text: str, data: Images | Text | None) -> list[str]:
    known = MODELS if data is None else tuple(m for m in MODELS if m in fitting(data))
    return names("--models", text, known) if text else list(known)


def _finished(
    settings: dict[str, Any],
    folder: Path,
    own: Images | Text | None,
    console: Console,
    *,
    again: bool,
) -> dict[str, Any]:
    # Trained, compared, written and shown, as far as it got.
    document = _started(folder, settings, again=again)
    try:
        _train(document, folder, own, console)
    except KeyboardInterrupt:
        console.print("Interrupted: the same command goes on from here.")
    document["summary"] = summarise(document)
    write(folder / "results.json", document)
    for path in report.write(document, folder):
        console.print(literal(f"Written: {path}"), soft_wrap=True)
    console.print(report.table(document))
    return document


def _check_steps(steps: int | None) -> None:
    if steps is not None and steps <= SETTLING:
        raise ConfigError(f"--steps {steps}: the first {SETTLING} are not counted; give more.")


def _started(out: Path, settings: dict[str, Any], *, again: bool) -> dict[str, Any]:
    # What an interrupted run with the same settings has found so far, or a new document.
    same = {"version": VERSION, "settings": settings}
    found = None if again else stored(out / "results.json", _TYPES, **same)
    return found or {
        "kind": "accuracy",
        **same,
        "environment": environment(),
        "runs": [],
        "gradient_errors": {},
        "models": {},
        "complete": False,
    }


def _train(
    document: dict[str, Any], out: Path, data: Images | Text | None, console: Console
) -> None:
    settings = document["settings"]
    done = {(run["model"], run["seed"]) for run in document["runs"]}
    bar = (TextColumn("{task.description:<16}"), BarColumn(), MofNCompleteColumn())
    with Progress(*bar, TimeElapsedColumn(), console=console) as progress:
        for name in settings["models"]:
            task = make_task(name, quick=settings["quick"], n_steps=settings["steps"], data=data)
            document["models"][name] = {"n_steps": task.n_steps, **task.facts}
            for seed in range(settings["seeds"]):
                if (name, seed) in done:
                    continue
                row = progress.add_task(f"{name}, seed {seed}", total=task.n_steps)
                _one(document, task, seed, lambda row=row: progress.advance(row))
                write(out / "results.json", document)
    document["complete"] = True


def _one(document: dict[str, Any], task: Task, seed: int, on_step: Any) -> None:
    policies = document["settings"]["policies"]
    replicas = train(task, policies, seed, on_step)
    runs = [replica.finish() for replica in replicas.values()]
    if seed == 0:
        found = errors(replicas["off"].model, task, policies[1:], seed)
        document["gradient_errors"][task.name] = found
    document["runs"] += [{"model": task.name, **asdict(run)} for run in runs]
