"""`python -m bench codecs`: ratio and speed of every codec on recorded tensors, against memcpy."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import torch
import typer
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from bench.environment import environment
from bench.recorded import KINDS, DataSet, record
from bench.settings import N_THREADS
from bench.timing import Timing, interleaved
from bench.user_tensors import load
from bench.user_tensors import record as record_script
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.registry import get_codec, list_codecs
from cswap.codecs.tiled import all_threads
from cswap.errors import ConfigError, CswapError
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.codecs.base import Codec

MIB: Final = 1 << 20
MEMCPY: Final = "memcpy"
BLOSC: Final = "blosc2"
DEFAULT_OUT: Final = Path("bench/results/cpu/codecs.json")


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one data set.

    Attributes:
        data: kind of tensor.
        dtype: its dtype.
        codec: name, or a peer's.
        lossless: whether every bit comes back.
        nbytes: raw bytes.
        ratio: raw over encoded bytes.
        encode_gb_per_s: raw bytes per second, in 1e9.
        decode_gb_per_s: raw bytes per second, in 1e9.
        encode_of_memcpy: as a fraction of memcpy's rate in the same rounds.
        decode_of_memcpy: likewise.
        encode: seconds.
        decode: seconds.
        relative_rms_error: of what comes back; 0 if lossless.
    """

    data: str
    dtype: str
    codec: str
    lossless: bool
    nbytes: int
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode_of_memcpy: float
    decode_of_memcpy: float
    encode: Timing
    decode: Timing
    relative_rms_error: float


@dataclass(frozen=True, slots=True)
class Contender:
    """Something that encodes and decodes one data set.

    Attributes:
        lossless: whether every bit comes back.
        nbytes: encoded bytes.
        encode: does it once.
        decode: does it once.
        result: what decode wrote.
    """

    lossless: bool
    nbytes: int
    encode: Callable[[], object]
    decode: Callable[[], object]
    result: Callable[[], torch.Tensor]


def _codec(codec: Codec, x: torch.Tensor) -> Contender:
    out = torch.empty(codec.bound(x.dtype, x.numel()), dtype=torch.uint8)
    size = codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None)
    nbytes = size if isinstance(size, int) else size.value()
    payload, back = out[:nbytes].clone(), torch.empty_like(x)
    return Contender(
        codec.lossless,
        nbytes,
        lambda: codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None),
        lambda: codec.decode_flat(payload, back, stream=None),
        lambda: back,
    )


def _memcpy(x: torch.Tensor) -> Contender:
    out, back = torch.empty_like(x), torch.empty_like(x)
    return Contender(True, x.nbytes, lambda: out.copy_(x), lambda: back.copy_(out), lambda: back)


def _blosc(x: torch.Tensor) -> Contender | None:
    try:
        import blosc2
    except ImportError:
        return None
    source = x.view(torch.uint8).numpy()
    settings: dict[str, Any] = {
        "typesize": x.element_size(),
        "nthreads": torch.get_num_threads(),
        "clevel": 1,
    }
    packed = blosc2.compress2(source, codec=blosc2.Codec.ZSTD, **settings)
    back = torch.empty_like(x)
    target = back.view(torch.uint8).numpy()
    return Contender(
        True,
        len(packed),
        lambda: blosc2.compress2(source, codec=blosc2.Codec.ZSTD, **settings),
        lambda: blosc2.decompress2(packed, dst=target, nthreads=torch.get_num_threads()),
        lambda: back,
    )


def _contenders(x: torch.Tensor, names: tuple[str, ...]) -> dict[str, Contender]:
    found = {MEMCPY: _memcpy(x)}
    for name in names or list_codecs():
        try:
            codec = get_codec(name)
        except CswapError:  # its package is not installed: `cswap codecs` says which
            continue
        if codec.supports(x.dtype):
            found[name] = _codec(codec, x)
    peer = None if names else _blosc(x)
    if peer is not None:
        found[BLOSC] = peer
    return found


def _measure(data: DataSet, rounds: int, names: tuple[str, ...]) -> list[Row]:
    contenders = _contenders(data.tensor, names)
    encodes = interleaved({n: c.encode for n, c in contenders.items()}, rounds=rounds)
    decodes = interleaved({n: c.decode for n, c in contenders.items()}, rounds=rounds)
    nbytes = data.tensor.nbytes
    return [
        Row(
            data=data.kind,
            dtype=dtype_name(data.tensor.dtype),
            codec=name,
            lossless=c.lossless,
            nbytes=nbytes,
            ratio=nbytes / c.nbytes,
            encode_gb_per_s=nbytes / encodes[name].median_s / 1e9,
            decode_gb_per_s=nbytes / decodes[name].median_s / 1e9,
            encode_of_memcpy=encodes[MEMCPY].median_s / encodes[name].median_s,
            decode_of_memcpy=decodes[MEMCPY].median_s / decodes[name].median_s,
            encode=encodes[name],
            decode=decodes[name],
            relative_rms_error=_error(data.tensor, c),
        )
        for name, c in contenders.items()
    ]


def _error(x: torch.Tensor, contender: Contender) -> float:
    contender.decode()
    back = contender.result()
    if contender.lossless:
        if not torch.equal(x.view(torch.uint8), back.view(torch.uint8)):
            raise RuntimeError("a lossless codec changed bits: no figure is reported")
        return 0.0
    exact = x.double()
    return float((back.double() - exact).norm() / exact.norm())


def _table(rows: list[Row]) -> Table:
    table = Table(
        title="Codecs on recorded tensors",
        caption="enc, dec: GB/s of raw bytes; x: fraction of memcpy's rate in the same rounds, "
        f"{torch.get_num_threads()} threads; error: relative root mean square.",
    )
    table.add_column("data", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    for heading in ("ratio", "enc", "x", "dec", "x", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, r in enumerate(rows):
        last = i + 1 == len(rows) or (rows[i + 1].data, rows[i + 1].dtype) != (r.data, r.dtype)
        table.add_row(
            f"{r.data} {r.dtype}",
            r.codec,
            f"{r.ratio:.2f}",
            f"{r.encode_gb_per_s:.2f}",
            f"{r.encode_of_memcpy:.2f}",
            f"{r.decode_gb_per_s:.2f}",
            f"{r.decode_of_memcpy:.2f}",
            "" if r.lossless else f"{r.relative_rms_error:.1e}",
            end_section=last,
        )
    return table


def _codec_names(text: str) -> tuple[str, ...]:
    names = tuple(name.strip() for name in text.split(",") if name.strip())
    for name in names:
        get_codec(name)
    return names


def _kinds(text: str) -> list[str]:
    chosen = [kind.strip() for kind in text.split(",") if kind.strip()]
    unknown = sorted(set(chosen) - set(KINDS))
    if unknown:
        raise ConfigError(f"--kinds {', '.join(unknown)}: known are {', '.join(KINDS)}")
    return chosen


def main(
    device: Annotated[str, typer.Option(help="Only 'cpu' for now.")] = "cpu",
    mib: Annotated[int, typer.Option(help="Size of each data set, in MiB.")] = 64,
    rounds: Annotated[int, typer.Option(help="Counted rounds.")] = 7,
    out: Annotated[Path, typer.Option(help="Result file (JSON).")] = DEFAULT_OUT,
    kinds: Annotated[str, typer.Option(help=f"Some of {', '.join(KINDS)}.")] = ",".join(KINDS),
    threads: Annotated[int, typer.Option(help="Of codecs and memcpy alike.")] = N_THREADS,
    quick: Annotated[bool, typer.Option(help="Small and short, to see that it works.")] = False,
    codecs: Annotated[str, typer.Option(help="Only these, comma-separated; default: all.")] = "",
    tensors: Annotated[str, typer.Option(help="Measure on the tensors of this file.")] = "",
    script: Annotated[str, typer.Option("--record", help="On what this script saves.")] = "",
) -> None:
    """Measure ratio and speed of every codec on recorded tensors, or on your own.

    Your own come from a file (--tensors, of torch, safetensors or numpy) or from a script (--record
    runs it and keeps what autograd saves). Results of those are written only where --out says.
    """
    console = Console()
    try:
        names = _codec_names(codecs)
        chosen = _kinds(kinds)
        if device != "cpu" or min(mib, rounds, threads) < 1:
            raise ConfigError("--device must be cpu; --mib, --rounds and --threads at least 1")
        own = load(tensors) if tensors else record_script(script) if script else None
    except CswapError as error:
        console.print(str(error), style="red", markup=False)
        raise typer.Exit(2) from error
    torch.set_num_threads(threads)
    all_threads.cache_clear()
    where = environment()
    if own is None:
        console.print("Recording tensors ...")
        own = [s for s in record((1 if quick else mib) * MIB, quick=quick) if s.kind in chosen]
    rows: list[Row] = []
    with Progress(console=console, transient=True) as progress:
        for data in progress.track(own, description="measuring"):
            rows += _measure(data, 2 if quick else rounds, names)
    console.print(_table(rows))
    if (tensors or script) and out == DEFAULT_OUT:
        return  # the committed results are of the recorded tensors
    out.parent.mkdir(parents=True, exist_ok=True)
    result = {"version": 1, "environment": where, "rows": [asdict(r) for r in rows]}
    out.write_text(json.dumps(result, indent=1) + "\n")
    console.print(f"Written: {out}")
