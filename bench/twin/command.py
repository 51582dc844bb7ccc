"""`python -m bench twin`: peak and time of a step on a GPU, simulated by a GPU with a clock.

The real engine trains on the stand-in for `torch.cuda` (see cuda.py), in virtual time: nothing is
measured with a clock, so two runs give the same microseconds on any machine.
"""

from __future__ import annotations

import json
from functools import partial as bound
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console
from rich.progress import track

from bench.twin import largest, report
from bench.twin.methods import CHECKPOINT, FIT, METHODS
from bench.twin.models import ALL, MODELS
from bench.twin.optimum import curve
from bench.twin.policies import PLANNED_MODELS, POLICIES, compared
from bench.twin.profiles import H200, PROFILES
from bench.twin.runs import call, rows
from bench.twin.validate import validate
from cswap.experiments.files.resumable import Partial
from cswap.experiments.options import Again, names, needs, writable_file
from cswap.report.terminal import literal
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Sequence

RESULTS: Final = Path("bench/results/twin")
VERSION: Final = 1

SHARES: Final = (1.0, 0.9, 0.75, 0.6, 0.5, 0.35, 0.25, 0.15, 0.1, 0.05)
"""Of the saved bytes, that are left at a point of the curve of the best possible."""


def main(
    models: Annotated[str, typer.Option(help=f"Some of {', '.join(MODELS)}.")] = ",".join(MODELS),
    profile: Annotated[str, typer.Option(help=f"One of {', '.join(PROFILES)}.")] = H200.name,
    methods: Annotated[str, typer.Option(help=f"Some of {', '.join(METHODS)}.")] = ",".join(
        METHODS
    ),
    out: Annotated[
        Path | None, typer.Option(help="Result file (JSON); the picture is beside it.")
    ] = None,
    trace: Annotated[
        bool, typer.Option("--trace", help="One step of the first row, as a Chrome trace in --out.")
    ] = False,
    check: Annotated[
        bool, typer.Option("--validate", help="Against the rows measured on an H200 only.")
    ] = False,
    policies: Annotated[
        bool, typer.Option("--policies", help="Plans of all policies, predicted and followed.")
    ] = False,
    batches: Annotated[
        bool, typer.Option("--largest", help="The largest batch that an RTX 4090 holds.")
    ] = False,
    redraw: Annotated[
        bool, typer.Option("--redraw", help="The picture of --out anew; simulate nothing.")
    ] = False,
    again: Again = False,
) -> None:
    """Simulate training steps on a GPU: no GPU is needed, and nothing depends on this machine."""
    needs("bench twin", "scipy", "matplotlib")
    console = Console()
    if check:
        _validate(out or RESULTS / "validation.json", console)
        return
    if batches:
        _largest(models, out or RESULTS / "largest.json", console, again=again)
        return
    (profile,) = names("--profile", profile, list(PROFILES))
    if policies:
        _policies(models, profile, out or RESULTS / "policies.json", console, again=again)
        return
    wanted = names("--models", models, list(ALL))
    ways = names("--methods", methods, METHODS)
    out = out or (Path("twin-trace.json") if trace else RESULTS / f"{profile}.json")
    if redraw:
        _draw(read_object(out, "file"), out, console)
        return
    writable_file(out)
    if trace:
        same = {"model": wanted[0], "method": ways[0], "profile": profile}
        out.write_text(json.dumps(report.chrome_trace(call("worker", {**same, "draws": True}))))
        console.print(literal(f"Written: {out}"))
        return
    settings = {"models": wanted, "methods": ways, "profile": profile}
    partial = Partial(out, kind="twin", version=VERSION, settings=settings, again=again)
    simulated: list[dict[str, Any]] = []
    for name in track(wanted, "Simulating", console=console):
        simulated += partial.part(name, bound(_rows, name, ways, profile))
    curves = {
        name: partial.part(f"{name}, optimum", bound(_optimum, name, profile))
        for name in track(wanted, "The best possible", console=console)
    }
    document = partial.finish(rows=simulated, optimum=curves)
    console.print(report.table(document))
    console.print(literal(f"Written: {out}"))
    _draw(document, out, console)


def _draw(document: dict[str, Any], out: Path, console: Console) -> None:
    report.draw(document, out.with_suffix(".png"))
    console.print(literal(f"Written: {out.with_suffix('.png')}"))


def _policies(models: str, profile: str, out: Path, console: Console, *, again: bool) -> None:
    wanted = PLANNED_MODELS if models == ",".join(MODELS) else names("--models", models, list(ALL))
    writable_file(out)
    settings = {"models": list(wanted), "policies": list(POLICIES), "profile": profile}
    partial = Partial(out, kind="twin policies", version=VERSION, settings=settings, again=again)
    found: list[dict[str, Any]] = []
    for name in track(wanted, "Planning and simulating", console=console):
        found += partial.part(name, bound(compared, name, profile, POLICIES))
    console.print(report.policies(partial.finish(rows=found)))
    console.print(literal(f"Written: {out}"))


def _largest(models: str, out: Path, console: Console, *, again: bool) -> None:
    wanted = largest.MODELS if models == ",".join(MODELS) else names("--models", models, list(ALL))
    writable_file(out)
    settings = {"models": list(wanted), "profiles": list(largest.GPUS)}
    partial = Partial(out, kind="twin largest", version=VERSION, settings=settings, again=again)
    pairs = [(model, profile) for model in wanted for profile in largest.GPUS]
    found: list[dict[str, Any]] = []
    for pair in track(pairs, "Simulating", console=console):
        found += partial.part(", ".join(pair), bound(largest.largest, *pair))
    console.print(report.largest(partial.finish(rows=found)))
    console.print(literal(f"Written: {out}"))


def _rows(model: str, methods: Sequence[str], profile: str) -> list[dict[str, Any]]:
    same = {"model": model, "profile": profile}
    found = list(rows({**same, "method": m} for m in methods if m != FIT))
    peaks = [r["peak_bytes"] for r in found if r["method"] == CHECKPOINT and "peak_bytes" in r]
    if FIT in methods and peaks:
        found += rows([{**same, "method": FIT, "fit": peaks[0]}])
    return found


def _optimum(model: str, profile: str) -> list[dict[str, Any]]:
    recording = call("recording", {"model": model, "profile": profile})
    return [point._asdict() for point in curve(recording, PROFILES[profile], SHARES)]


def _validate(out: Path, console: Console) -> None:
    writable_file(out)
    partial = Partial(out, kind="twin validation", version=VERSION, settings={}, again=True)
    residuals = validate()
    document = partial.finish(rows=residuals)
    console.print(report.residuals(document))
    console.print(literal(f"Written: {out}"))
    if not all(one["holds"] for one in residuals):
        raise typer.Exit(1)
