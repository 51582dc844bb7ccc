"""`python -m bench overhead`: the cost of the hooks themselves, beyond codecs and copies."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.overhead import hook_costs, in_models, swapped
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.experiments.files.environment import environment
from cswap.experiments.files.writing import write
from cswap.experiments.meters.timing import Timing, interleaved
from cswap.experiments.options import N_THREADS, writable_file
from cswap.report import terminal
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS: Final = 500
DEFAULT_OUT: Final = Path("bench/results/cpu/overhead.json")
VERSION: Final = 2
"""Version of the result file. 1 had no peers and no `rows`."""


def _identity(x: torch.Tensor) -> torch.Tensor:
    return x


def _through_identity(x: torch.Tensor) -> torch.Tensor:
    return _identity(_identity(x))


def _through(engine: SwapEngine, x: torch.Tensor) -> torch.Tensor:
    return engine.unpack(engine.pack(x))


def _repeat(step: Callable[[], object], repeats: int) -> Callable[[], None]:
    def run() -> None:
        for _ in range(repeats):
            step()

    return run


def _ineligible(rounds: int) -> dict[str, float]:
    # Microseconds of pack + unpack above an identity hook, for tensors that stay.
    engine = SwapEngine(SwapConfig())
    tensors = {
        "small": torch.randn(16),
        "small, not a leaf": torch.randn(16, requires_grad=True) * 2,
        "parameter": torch.nn.Parameter(torch.randn(512, 512)),
    }
    contenders: dict[str, Callable[[], object]] = {}
    for name, x in tensors.items():
        contenders[f"identity {name}"] = _repeat(partial(_through_identity, x), REPEATS)
        contenders[name] = _repeat(partial(_through, engine, x), REPEATS)
    timings = interleaved(contenders, rounds=rounds)
    return {
        name: 1e6 * (timings[name].median_s - timings[f"identity {name}"].median_s) / REPEATS
        for name in tensors
    }


def _beyond_kernels(rounds: int) -> tuple[dict[str, float], dict[str, dict[str, Timing]]]:
    # Microseconds of a 1 MiB tensor's swap above its kernels and copies, and the timings.
    repeats = max(1, REPEATS // 50)
    raw = {
        codec: swapped.measure(codec, rounds=rounds, repeats=repeats, cold_rounds=2 * rounds)
        for codec in ("raw", "zvc")
    }
    rows = {}
    for codec, timings in raw.items():
        for caches, prefix in (("", ""), (", cold caches", "cold ")):
            for kernels in ("kernels", "kernels by address"):
                swap_s = timings[f"{prefix}swap"].median_s
                beyond_s = swap_s - timings[f"{prefix}{kernels}"].median_s
                rows[f"1 MiB by {codec}{caches}: beyond its {kernels}"] = 1e6 * beyond_s
        begin_s = timings["cold begin"].median_s
        rows[f"a step's begin by {codec}, cold caches, {swapped.TENSORS} tensors"] = 1e6 * begin_s
    raw["floors"] = swapped.floors(2 * rounds)
    for name, timing in raw["floors"].items():
        rows[f"1 MiB, cold caches: {name}"] = 1e6 * timing.median_s
    return rows, raw


def _in_models(rounds: int) -> tuple[dict[str, float], dict[str, dict[str, Timing]]]:
    # The same in steps of models, as rows and as timings.
    rows, raw = {}, in_models.measure(rounds)
    for model, timings in raw.items():
        for codec in in_models.CODECS:
            for kernels in (f"kernels of {codec}", f"kernels of {codec} by address"):
                beyond_s = timings[codec].median_s - timings[kernels].median_s
                name = kernels.replace(f" of {codec}", "")
                rows[f"1 MiB by {codec}, in steps of {model}: beyond its {name}"] = 1e6 * beyond_s
        whole_s = timings[in_models.PEER].median_s
        rows[f"1 MiB, in steps of {model}: {in_models.PEER}, its copies included"] = 1e6 * whole_s
    return rows, {f"in steps of {model}": timings for model, timings in raw.items()}


def _table(rows: dict[str, float], costs: list[dict[str, Any]]) -> Table:
    table = Table(title="Cost of pack + unpack, median", caption=hook_costs.NOTE)
    for heading in ("what", "of"):
        table.add_column(heading)
    table.add_column("us", justify="right")
    table.add_column("20 % ... 80 %", justify="right")
    for name, us in rows.items():
        table.add_row("cswap", name, f"{us:.1f}", "")
    for row in costs:
        table.add_row(*hook_costs.figures(row))
    return table


def main(
    rounds: Annotated[int, typer.Option(help="Counted rounds.", min=1)] = 15,
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = DEFAULT_OUT,
    quick: Annotated[bool, typer.Option("--quick", help="Two rounds: does it work?")] = False,
) -> None:
    """Measure the hooks' own cost per saved tensor, in microseconds; peers beside them."""
    writable_file(out)
    torch.set_num_threads(N_THREADS)
    if quick:
        rounds = min(rounds, 2)
    console, where = Console(), environment("overhead")
    with Progress(console=console, transient=True) as progress:
        bar = progress.add_task("tensors that stay", total=4)
        rows = {f"{name}: above an identity hook": us for name, us in _ineligible(rounds).items()}
        progress.update(bar, advance=1, description="tensors that are swapped")
        beyond, raw = _beyond_kernels(rounds)
        rows.update(beyond)
        progress.update(bar, advance=1, description="tensors of models")
        more, in_steps = _in_models(max(1, rounds // 2))
        rows.update(more)
        raw.update(in_steps)
        progress.update(bar, advance=1, description="peers")
        costs = hook_costs.measure(rounds)
        progress.advance(bar)
    terminal.show(_table(rows, costs), console=console)
    timings = {codec: {k: asdict(t) for k, t in ts.items()} for codec, ts in raw.items()}
    result = {
        "kind": "overhead",
        "version": VERSION,
        "environment": where,
        "microseconds": rows,
        "timings": timings,
        "rows": costs,
    }
    write(out, result)
    console.print(literal(f"Written: {out}"))
