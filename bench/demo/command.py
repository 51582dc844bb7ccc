"""`python -m bench demo`: two models, trained without cswap, with it, and with checkpointing."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from bench.demo.settings import DEFAULT_MODELS, DEFAULT_MODES, MODELS, MODES, DemoSettings


def main(
    out: Annotated[Path, typer.Option(help="Folder for results.json and demo.png.")] = Path(
        "demo-out"
    ),
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = ",".join(
        DEFAULT_MODELS
    ),
    modes: Annotated[
        str, typer.Option(help=f"Some of {', '.join(MODES)}; 'off' must be one.")
    ] = ",".join(DEFAULT_MODES),
    steps: Annotated[int | None, typer.Option(help="Training steps per model.")] = None,
    seed: Annotated[int, typer.Option(help="Of weights, batches and dropout.")] = 0,
    quick: Annotated[bool, typer.Option(help="Tiny models, a few steps: does it work?")] = False,
) -> None:
    """Train a CNN and a GPT on the CPU: off, with cswap, and with torch's checkpointing."""
    settings = DemoSettings.parse(
        out=out, models=models, modes=modes, steps=steps, seed=seed, quick=quick
    )
    # Imported after the checks, because they import torch, which takes two seconds.
    from bench.demo.run import run
    from cswap.experiments.options import needs

    needs("bench demo", "matplotlib", "sklearn", extra="bench,dev")

    raise typer.Exit(run(settings))
