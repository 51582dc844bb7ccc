"""`python -m bench gpu`: measurements that need a CUDA device, and its kernels."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated, Any, Final

import torch
import typer

from bench.gpu import build, codecs, link, swap, tables, trace, training
from bench.gpu.meter import CudaMeter, Meter
from bench.gpu.report import (
    EXPECTED_S,
    BrokenDeviceError,
    Deadline,
    OutOfTimeError,
    Report,
    gpu_facts,
    slug,
)
from cswap.experiments.options import names, writable_folder

RESULTS: Final = Path("bench/results")

STATIC: Final = RESULTS / "cpu" / "kernels.json"
"""Where `static` writes, if nothing else is said."""

KERNELS: Final = Path("cswap-kernels")
"""Where `build` writes, if nothing else is said."""


class Part(str, Enum):
    """The parts."""

    CODECS = "codecs"
    LINK = "link"
    SWAP = "swap"
    TRAINING = "training"
    TRACE = "trace"
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
    out: Annotated[
        Path | None,
        typer.Option(
            help="Folder; default: bench/results/<name of the GPU>. "
            f"Of build: folder; of static: file; default: {KERNELS}, {STATIC}."
        ),
    ] = None,
    minutes: Annotated[
        float | None,
        typer.Option(help="Begin no measurement that might not end within this time."),
    ] = None,
    first: Annotated[
        bool,
        typer.Option("--first", help="Only the measurements that are worth most: some minutes."),
    ] = False,
    arch: Annotated[
        str, typer.Option(help="Of build: architectures, 90 for sm_90, with commas between them.")
    ] = "90",
    record: Annotated[
        Path | None,
        typer.Option(help="Of build: also write its seconds, size and machine to this JSON file."),
    ] = None,
) -> None:
    """Measure codecs, link, swaps and training on a CUDA device; JSON for each.

    The most valuable measurements come first. The same command continues after an interruption.
    """
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
    chosen = list(EXPECTED_S) if part is Part.ALL else [part.value]
    deadline = Deadline(None if minutes is None else 60.0 * minutes)
    code = measure(CudaMeter(), gpu_facts(), folder, chosen, deadline, only_first=first)
    raise typer.Exit(code)


def measure(
    meter: Meter,
    gpu: dict[str, Any],
    folder: Path,
    parts: list[str],
    deadline: Deadline,
    *,
    only_first: bool = False,
) -> int:
    """Run the parts, the measurements worth most first; return the exit code.

    Results are in the folder after every measurement.

    Args:
        meter: of the device.
        gpu: facts about it.
        folder: of the results.
        parts: keys of `EXPECTED_S`.
        deadline: of all measurements.
        only_first: whether to leave it at those worth most.
    """
    settings = {"only_first": True} if only_first else {}
    reports = [Report(folder, name, meter, gpu, deadline, settings) for name in parts]
    code = 0
    try:
        for report in reports:
            _run(report, meter, first=True)
            if only_first:  # what comes may take too long
                report.finish()
        for report in () if only_first else reports:
            _run(report, meter, first=False)
            report.finish()
    except OutOfTimeError as error:
        print(f"Stopped in time: {error}. The same command continues.", flush=True)
    except BrokenDeviceError as error:
        print(f"Stopped: {error}. The same command continues behind it.", flush=True)
        code = 1
    for report in reports:
        print(tables.markdown(report.document), flush=True)
    print(f"all results: {folder}", flush=True)
    return code


def _run(report: Report, meter: Meter, *, first: bool) -> None:
    if report.part == "codecs":
        codecs.run(meter, report, codecs.FIRST if first else codecs.Plan())
    elif report.part == "link":
        link.run(meter, report, link.FIRST if first else link.Plan())
    elif report.part == "swap":
        swap.run(meter, report, swap.FIRST if first else swap.Plan())
    elif report.part == "trace":
        trace.run(meter, report)
    else:
        for plan in training.FIRST if first else (training.Plan(),):
            training.run(meter, report, plan)


def _build(path: Path, architectures: str, record: Path | None) -> None:
    from cswap_kernels.cuda.compiler import ARCHITECTURES

    chosen = [int(a) for a in names("--arch", architectures, [str(a) for a in ARCHITECTURES])]
    for folder in (path, *([] if record is None else [record.absolute().parent])):
        writable_folder(folder)
    before = build.facts()
    row = build.build(path, build.kernel_names(), chosen)
    if record is not None:
        build.record(record, row, before)
    print(f"{row.n_kernels} kernels in {row.build_s:.0f} s: {path}, {row.nbytes / 1e6:.1f} MB")
    print(f"On the machine with the device: export CSWAP_CACHE_DIR=$PWD/{path.name}")


def _static(path: Path) -> None:
    from bench.gpu import static  # needs the interpreter, a disassembler and numba-cuda

    writable_folder(path.absolute().parent)
    static.run(path)
    print(f"computed, not measured: {path}")
