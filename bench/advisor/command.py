"""`python -m bench advisor`: the advisor's choices against the best, static ones and CSwap+'s."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import Progress

from bench.advisor import prediction
from bench.advisor.cells import Cell
from bench.advisor.models import MODELS, UNSEEN
from bench.advisor.recording import record
from bench.advisor.report import draw, tables
from bench.advisor.truth import MODES, outcomes
from cswap.advisor import calibrate
from cswap.experiments.files.environment import environment
from cswap.experiments.files.writing import write
from cswap.experiments.options import N_THREADS, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

DEFAULT_OUT: Final = Path("bench/results/cpu/advisor.json")


def main(
    quick: Annotated[bool, typer.Option("--quick", help="Small models, one repetition.")] = False,
    out: Annotated[
        Path, typer.Option(help="Result file (JSON); the picture is beside it.")
    ] = DEFAULT_OUT,
) -> None:
    """Compare the advisor with the oracle, static codecs, CSwap+'s rule and raw."""
    writable_file(out)
    torch.set_num_threads(N_THREADS)
    where = environment()
    with tempfile.TemporaryDirectory() as folder:
        os.environ["CSWAP_CACHE_DIR"] = folder  # a fresh calibration, and no stored one
        result = {"kind": "advisor", "version": 4, "environment": where, **measure(quick=quick)}
    write(out, result)
    draw(result["cells"], out.with_suffix(".png"))
    console = Console()
    for table in tables(result):
        terminal.show(table, console=console)
    console.print(literal(f"Written: {out}, {out.with_suffix('.png')}"))


def measure(*, quick: bool) -> dict[str, Any]:
    """Everything but the environment."""
    models = (*MODELS[:2], *UNSEEN[:1]) if quick else MODELS
    cells, errors = [], {}
    with Progress() as progress:
        bar = progress.add_task("Calibrating", total=2 + 2 * len(models))
        for _ in calibrate.steps("cpu"):
            pass
        progress.advance(bar)
        for model in models:
            progress.update(bar, description=f"Recording {model}")
            recording = record(model, quick=quick)
            known = outcomes(recording, repeat=1 if quick else 5)
            errors[model] = prediction.errors(recording, known)
            progress.advance(bar)
            progress.update(bar, description=f"Choosing for {model}")
            cells += [_row(Cell(recording, known, mode)) for mode in MODES]
            progress.advance(bar)
    return {
        "cells": cells,
        "prediction": prediction.summary(errors),
        "prediction_by_model": errors,
    }


def _row(cell: Cell) -> dict[str, Any]:
    recording, statics = cell.recording, cell.static()
    best = min(statics, key=statics.__getitem__)
    return {
        "model": recording.model,
        "unseen": recording.model in UNSEEN,
        "mode": cell.mode,
        "tensors": len(recording.tensors),
        "raw_bytes": recording.nbytes,
        "oracle_s": cell.total_s(cell.oracle()),
        "advisor_s": cell.total_s(cell.advised()),
        "best_static": best,
        "best_static_s": statics[best],
        "static_s": statics,
        "cswap_plus_s": cell.total_s(cell.by_the_paper()),
        "raw_s": cell.total_s(["raw"] * len(recording.tensors)),
    }
