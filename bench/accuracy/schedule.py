"""`python -m bench schedule`: CSwap+'s sliding-down rate against constant and rising rates.

CSwap+ (section 5.2.2) sends dense tensors through ZFP at a rate that falls over the epochs, "since
early epochs are more sensitive". Here the same network is trained from the same seeds with the
rates in falling order, in rising order, and at their mean all the time. All three encode the same
number of bytes, to a few thousandths: epochs differ by one step, and zfp fills its last words.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import asdict
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console
from torch import nn

import cswap
from bench.accuracy.tasks import MARGINS, make
from cswap.advisor.cswap_plus import sliding_down
from cswap.experiments.accuracy.report import change, number
from cswap.experiments.accuracy.train import gradients, repeatable, validate
from cswap.experiments.accuracy.verdict import (
    CONFIDENCE,
    FEWEST_SEEDS,
    UNDECIDED,
    interval,
    verdict,
)
from cswap.experiments.files.resumable import Partial
from cswap.experiments.grid import Grid
from cswap.experiments.launchers import LOCAL, JobsOption, Launcher
from cswap.experiments.options import Again, needs, writable_file
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.experiments.task import Task

FILE: Final = Path("bench/results/cpu/accuracy/schedule.json")
VERSION: Final = 1
MODEL: Final = "cnn"
EPOCHS: Final = 9
"""Parts of the training, in each of which the rate is constant: 9 rates, 11 down to 3."""

TOP: Final = 11
BOTTOM: Final = 3
"""Bits per value. Below 3, zfp's exponents take the bits of a block; at 11, the error is small."""

FALLING: Final = tuple(sliding_down(TOP, BOTTOM, epoch, EPOCHS) for epoch in range(EPOCHS))
SCHEDULES: Final[dict[str, tuple[int, ...]]] = {
    "off": (),
    "sliding down": FALLING,
    "constant": (sum(FALLING) // EPOCHS,) * EPOCHS,
    "sliding up": FALLING[::-1],
    "lowest": (BOTTOM,) * EPOCHS,
}
"""Rates of zfp by epoch; "off" is plain training. "lowest" shows that the rate matters at all."""

HEADINGS: Final = (
    *("schedule", "mean bits per value", "encoded MiB per step", "val. loss"),
    *(f"against sliding down ({100 * CONFIDENCE:.0f} % CI)", "verdict", "accuracy %"),
)


def main(
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = FILE,
    seeds: Annotated[int, typer.Option(help="Matched seeds.", min=1)] = FEWEST_SEEDS,
    quick: Annotated[
        bool, typer.Option("--quick", help="A few steps, two seeds: decides nothing.")
    ] = False,
    again: Again = False,
    jobs: JobsOption = 1,
) -> None:
    """Train a dense network with ZFP's rate sliding down, constant, and sliding up.

    An interrupted run goes on when the same command is repeated.
    """
    torch.set_num_threads(1)
    needs("bench schedule", "scipy", "sklearn", extra="bench,dev")
    writable_file(out)
    n_seeds = min(seeds, 2) if quick else seeds
    settings = {
        "schedules": {name: list(rates) for name, rates in SCHEDULES.items()},
        "seeds": n_seeds,
        "quick": quick,
        "margin": MARGINS[MODEL],
    }
    partial = Partial(
        out, kind="accuracy schedule", version=VERSION, settings=settings, again=again
    )
    wanted = {f"{name} {seed}": (name, seed) for seed in range(n_seeds) for name in SCHEDULES}
    console = Console()
    runs = partial.parts(wanted, functools.partial(_run, quick), Launcher(LOCAL, jobs), console)
    document = partial.finish(runs=runs, rows=summarise(runs, settings))
    Grid(HEADINGS, cells(document), "ZFP's rate over a training").show(console)
    console.print(literal(f"Written: {out}"), soft_wrap=True)


def _run(
    quick: bool, part: tuple[str, int], on_step: Callable[[], object] = lambda: None
) -> dict[str, Any]:
    torch.set_num_threads(1)  # as the command, in another process, too
    task = make(MODEL, n_steps=EPOCHS if quick else None)
    with repeatable():
        return train(task, *part, on_step)


def train(task: Task, schedule: str, seed: int, on_step: Callable[[], object]) -> dict[str, Any]:
    """Train the task's network with LeakyReLU under one of `SCHEDULES`; a run for the file."""
    torch.manual_seed(seed)
    model = dense(task.build())
    optimizer = task.optimizer(model)
    losses, encoded = [], 0.0
    for epoch, steps in enumerate(_parts(task.n_steps)):
        rates = SCHEDULES[schedule]
        name = f"zfp:{rates[epoch]}" if rates else ""
        handle = cswap.install(model, codec=name, remat=False) if rates else None
        for step in steps:
            for group in optimizer.param_groups:
                group["lr"] = task.lr(step)
            optimizer.zero_grad()
            losses.append(gradients(model, task, seed, step))
            optimizer.step()
            on_step()
        if handle is not None:
            handle.engine.synchronize()
            zfp = [c for name, c in handle.stats.by_codec.items() if name.startswith("zfp")]
            encoded += sum(c.encoded for c in zfp)
            handle.remove()
    loss, accuracy = validate(model, task)
    return {
        "schedule": schedule,
        "seed": seed,
        "losses": losses,
        "validation_loss": loss,
        "accuracy": accuracy,
        "encoded_bytes_per_step": encoded / task.n_steps,
    }


def dense(model: nn.Module) -> Any:
    """The model with LeakyReLU in the place of ReLU, as CSwap+'s dense networks."""
    for name, child in model.named_children():
        if isinstance(child, nn.ReLU):
            setattr(model, name, nn.LeakyReLU())
        else:
            dense(child)
    return model


def _parts(n_steps: int) -> list[range]:
    bounds = [round(n_steps * epoch / EPOCHS) for epoch in range(EPOCHS + 1)]
    return [range(first, last) for first, last in pairwise(bounds)]


def summarise(runs: Sequence[dict[str, Any]], settings: dict[str, Any]) -> list[dict[str, Any]]:
    """A row per schedule, each compared with sliding down over the same seeds."""
    by_name = {name: [r for r in runs if r["schedule"] == name] for name in SCHEDULES}
    down = [run["validation_loss"] for run in by_name["sliding down"]]
    rows = []
    for name, mine in by_name.items():
        losses = [run["validation_loss"] for run in mine]
        rates = SCHEDULES[name]
        rows.append(
            {
                "schedule": name,
                "seeds": len(mine),
                "bits_per_value": statistics.fmean(rates) if rates else None,
                "encoded_bytes_per_step": statistics.fmean(
                    run["encoded_bytes_per_step"] for run in mine
                ),
                "validation_loss": statistics.fmean(losses),
                "accuracy": statistics.fmean(run["accuracy"] for run in mine),
                "against_down": asdict(interval(losses, down)),
                "verdict": UNDECIDED
                if settings["quick"]
                else verdict(losses, down, settings["margin"]),
            }
        )
    return rows


def cells(document: dict[str, Any]) -> list[list[str]]:
    """Rows of text, of `HEADINGS`."""
    return [
        [
            row["schedule"],
            "-" if row["bits_per_value"] is None else f"{row['bits_per_value']:.0f}",
            f"{row['encoded_bytes_per_step'] / 2**20:.2f}",
            number(row["validation_loss"], ".4f"),
            change(row["against_down"]),
            row["verdict"],
            number(row["accuracy"], ".1f", 100),
        ]
        for row in document["rows"]
    ]
