"""`python -m bench gpu`: what only a machine with a CUDA device can measure, and its kernels."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Final

import torch
import typer

from bench.gpu import build, codecs, link, pictures, swap, tables, targets, training
from bench.gpu.meter import CudaMeter, Meter
from bench.gpu.report import SHARES, Deadline, Report, shares, slug, where
from cswap.experiments.options import names, writable_folder

RESULTS: Final = Path("bench/results")

QUICK_MINUTES: Final = 9.0
"""Of `--quick`, if nothing else is said."""

STATIC: Final = RESULTS / "cpu" / "kernels.json"
"""Where `static` writes, if nothing else is said."""

KERNELS: Final = Path("cswap-kernels.zip")
"""Where `build` writes, if nothing else is said."""


class Part(str, Enum):
    """What to measure."""

    CODECS = "codecs"
    LINK = "link"
    SWAP = "swap"
    TRAINING = "training"
    ALL = "all"
    BUILD = "build"
    STATIC = "static"


def main(
    part: Annotated[
        Part,
        typer.Argument(
            help="What to measure. Without a device: build compiles all kernels; static computes "
            "from their machine code how fast they can be at best."
        ),
    ] = Part.ALL,
    quick: Annotated[bool, typer.Option(help="Fewer sizes and repetitions.")] = False,
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder; default: bench/results/<name of the GPU>. "
            f"Of build and static: file; default: {KERNELS}, {STATIC}."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Begin nothing new after this time; default: 9 with --quick, else none."),
    ] = None,
    arch: Annotated[
        str, typer.Option(help="Of build: architectures, 90 for sm_90, with commas between them.")
    ] = "90",
    record: Annotated[
        Path | None,
        typer.Option(help="Of build: also write its seconds, size and machine to this JSON file."),
    ] = None,
) -> None:
    """Measure codecs, link, swaps and training on a CUDA device; JSON and PNG for each."""
    if part is Part.BUILD:
        _build(out or KERNELS, arch, record)
        return
    if part is Part.STATIC:
        _static(out or STATIC)
        return
    if not torch.cuda.is_available():
        why = "torch is built without CUDA" if torch.version.cuda is None else "torch sees none"
        print(f"no CUDA device: {why}; this benchmark needs one. See `cswap doctor`.", flush=True)
        raise typer.Exit(2)
    if minutes is not None and not minutes > 0:
        print(f"--minutes {minutes}: must be above 0.", flush=True)
        raise typer.Exit(2)
    folder = writable_folder(out or RESULTS / slug(torch.cuda.get_device_name()))
    if minutes is None and quick:
        minutes = QUICK_MINUTES
    chosen = list(SHARES) if part is Part.ALL else [part.value]
    measure(CudaMeter(), folder, chosen, quick=quick, minutes=minutes)


def measure(
    meter: Meter, folder: Path, parts: list[str], *, quick: bool, minutes: float | None
) -> None:
    """Run the parts one after the other; results are in the folder after every measurement."""
    facts = where()
    deadlines = {
        name: Deadline(until_s)
        for name, until_s in shares(parts, None if minutes is None else 60.0 * minutes).items()
    }
    for name in parts:
        report = Report(folder, name, facts, deadlines[name])
        _run(name, meter, report, quick=quick)
        report.finish()
        print(tables.markdown(report.document), flush=True)
        picture = pictures.draw(report.document, report.path.with_suffix(".png"))
        print(f"picture: {picture or 'none, matplotlib is not installed'}", flush=True)
    print("\n".join(targets.lines(folder)), flush=True)


def _build(path: Path, architectures: str, record: Path | None) -> None:
    from cswap_kernels.cuda.compiler import ARCHITECTURES

    chosen = [int(a) for a in names("--arch", architectures, [str(a) for a in ARCHITECTURES])]
    for file in (path, *([] if record is None else [record])):
        writable_folder(file.absolute().parent)
    row = build.build(path, build.kernel_names(), chosen)
    if record is not None:
        build.record(record, row)
    print(f"{row.n_kernels} kernels in {row.build_s:.0f} s: {path}, {row.nbytes / 1e6:.1f} MB")
    print(f"On the machine with the device: export CSWAP_KERNELS={path.name}")


def _static(path: Path) -> None:
    from bench.gpu import static  # needs the interpreter, a disassembler and numba-cuda

    writable_folder(path.absolute().parent)
    static.run(path)
    print(f"computed, not measured: {path}")


def _run(name: str, meter: Meter, report: Report, *, quick: bool) -> None:
    if name == "codecs":
        codecs.run(meter, report, codecs.QUICK if quick else codecs.Plan())
    elif name == "link":
        link.run(meter, report, link.QUICK if quick else link.Plan())
    elif name == "swap":
        swap.run(meter, report, swap.QUICK if quick else swap.Plan())
    else:
        training.run(meter, report, training.QUICK if quick else training.Plan())
