"""`python -m bench overhead`: what the hooks themselves cost, beyond codecs and copies."""

from __future__ import annotations

import json
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import torch
import typer
from rich.console import Console
from rich.table import Table

from bench.environment import environment
from bench.settings import N_THREADS
from bench.timing import Timing, interleaved
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.layout import copy_bytes
from cswap.codecs.registry import get_codec
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine

if TYPE_CHECKING:
    from collections.abc import Callable

REPEATS: Final = 500
MIB: Final = 1 << 20
DEFAULT_OUT: Final = Path("bench/results/cpu/overhead.json")


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
    engine = SwapEngine(SwapConfig(workers=0))
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


def _eligible(codec_name: str, rounds: int) -> dict[str, Timing]:
    # One 1 MiB tensor out and back, in line; and its kernels and copies alone.
    codec = get_codec(codec_name)
    engine = SwapEngine(SwapConfig(workers=0, codec=codec_name, min_bytes=0))
    x = torch.relu(torch.randn(MIB // 4))
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8)
    size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None)
    nbytes = size if isinstance(size, int) else size.value()
    host = torch.empty(nbytes, dtype=torch.uint8)

    def kernels() -> None:
        if codec.verbatim:
            copy_bytes(host, x, nbytes)
        else:
            codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None)
            copy_bytes(host, out, nbytes)
        codec.decode_flat(host, torch.empty_like(x), stream=None)

    def both() -> None:
        engine.unpack(engine.pack(x))

    repeats = REPEATS // 10
    return interleaved(
        {"swap": _repeat(both, repeats), "kernels": _repeat(kernels, repeats)}, rounds=rounds
    )


def main(
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 15,
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = DEFAULT_OUT,
) -> None:
    """Measure the hooks' own cost per saved tensor, in microseconds."""
    torch.set_num_threads(N_THREADS)
    where = environment()
    rows = {f"{name}: above an identity hook": us for name, us in _ineligible(rounds).items()}
    raw: dict[str, dict[str, Timing]] = {}
    for codec in ("raw", "zvc"):
        raw[codec] = _eligible(codec, rounds)
        beyond = raw[codec]["swap"].median_s - raw[codec]["kernels"].median_s
        rows[f"1 MiB by {codec}: beyond its kernels"] = 1e6 * beyond / (REPEATS // 10)
    table = Table(title="Cost of pack + unpack, median")
    table.add_column("tensor")
    table.add_column("us", justify="right")
    for name, us in rows.items():
        table.add_row(name, f"{us:.1f}")
    console = Console()
    console.print(table)
    out.parent.mkdir(parents=True, exist_ok=True)
    timings = {codec: {k: asdict(t) for k, t in ts.items()} for codec, ts in raw.items()}
    result = {"version": 1, "environment": where, "microseconds": rows, "timings": timings}
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written: {out}")
