"""`python -m bench sparsity`: values of saved tensors, measured in short training runs."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.sparsity.stored import packed, save
from bench.sparsity.training import ACTIVATIONS, CHECKPOINTS, CODECS, RUNS, Run, train
from cswap.experiments.files.environment import environment
from cswap.experiments.files.resumable import stored
from cswap.experiments.options import names, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

VERSION: Final = 1
DEFAULT_OUT: Final = Path("bench/results/cpu/sparsity.json")


def main(
    out: Annotated[Path, typer.Option(help="Result file (JSON); finished runs in it stay.")] = (
        DEFAULT_OUT
    ),
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(RUNS)}.")] = ",".join(RUNS),
    quick: Annotated[bool, typer.Option("--quick", help="Two steps each, as a test.")] = False,
    again: Annotated[bool, typer.Option("--again", help="Discard the file's results.")] = False,
) -> None:
    """Train each model briefly with ReLU and with LeakyReLU, and measure its saved tensors."""
    wanted = _wanted(models, quick=quick)
    writable_file(out)
    document = _started(out, again=again)
    with Progress() as progress:
        bar = progress.add_task("Training", total=len(wanted) * (CHECKPOINTS + 1))
        for index, (run, activation) in enumerate(wanted):
            progress.update(bar, description=f"{run.model}, {activation}")
            key = f"{run.model} {activation}"
            if key not in document["runs"] or document["runs"][key]["steps"] != run.steps:
                document["runs"][key] = _one(run, activation, lambda: progress.advance(bar))
                save(out, document)
            progress.update(bar, completed=(CHECKPOINTS + 1) * (1 + index))
    console = Console()
    terminal.show(table(document), console=console)
    console.print(literal(f"Written: {out}"))


def _wanted(models: str, *, quick: bool) -> list[tuple[Run, str]]:
    chosen = [RUNS[name] for name in names("--models", models, tuple(RUNS))]
    runs = [replace(run, steps=CHECKPOINTS - 1, batch=2) if quick else run for run in chosen]
    return [(r, a) for r in runs for a in (("own",) if r.model == "gpt2" else ACTIVATIONS)]


def _started(out: Path, *, again: bool) -> dict[str, Any]:
    same = {"version": VERSION, "codecs": list(CODECS)}
    found = None if again else stored(out, {"runs": dict, "environment": dict}, **same)
    new = {**same, "environment": environment(), "runs": {}}
    return {"kind": "sparsity", **(found or new)}


def _one(run: Run, activation: str, on_checkpoint: Any) -> dict[str, Any]:
    began = time.perf_counter()
    checkpoints = []
    for checkpoint in train(run, activation):
        checkpoints.append(checkpoint)
        on_checkpoint()
    return {
        "model": run.model,
        "activation": activation,
        "steps": run.steps,
        "batch": run.batch,
        "lr": run.lr,
        "seconds": round(time.perf_counter() - began, 1),
        "torch_threads": torch.get_num_threads(),
        "at_steps": [c.step for c in checkpoints],
        "losses": [round(c.loss, 4) for c in checkpoints],
        "tensors": packed([c.values for c in checkpoints]),
    }


def table(document: dict[str, Any]) -> Table:
    """Zero fractions of the tensors that vDNN's family moves, at the first and last checkpoint."""
    shown = Table(title="Zeros among the inputs of convolutions and pooling (weighted by bytes)")
    for heading in ("model", "activation", "loss", "zeros before", "after", "zvc ratio after"):
        shown.add_column(heading)
    for run in document["runs"].values():
        first, last = (summary(run, at) for at in (0, -1))
        shown.add_row(
            run["model"],
            run["activation"],
            f"{run['losses'][0]:.2f} to {run['losses'][-1]:.2f}",
            f"{first[0]:.1%}",
            f"{last[0]:.1%}",
            f"{last[1]:.2f}",
        )
    return shown


def summary(run: dict[str, Any], checkpoint: int) -> tuple[float, float]:
    """Zero fraction and zvc's ratio over all floating saved tensors, weighted by elements."""
    zeros = raw = encoded = 0.0
    for row in run["tensors"]:
        ratios = row["ratios"].get("zvc")
        if row["signature"].startswith("float32") and ratios:
            n = row["elements"]
            zeros += n * row["profile"]["zero_fraction"][checkpoint]
            raw, encoded = raw + n, encoded + n / ratios[checkpoint]
    return (zeros / raw, raw / encoded) if raw else (0.0, 1.0)
