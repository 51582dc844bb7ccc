"""Machine code of all kernels in one folder, made on any machine: `python -m bench gpu build`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Final

from bench.pages.committed import as_markdown, load, where
from cswap.codecs import cubins
from cswap.experiments.files.environment import environment, version_of
from cswap.experiments.files.writing import write

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cswap_kernels.cuda.compiler import Cubin

FILE: Final = "kernels-build.json"
"""The committed record of a build."""

COMPILERS: Final = ("numba-cuda", "cuda-bindings", "nvidia-nvjitlink")


@dataclass(frozen=True, slots=True)
class Row:
    """One build.

    Attributes:
        architectures: that the kernels were compiled for, "sm_80, sm_90".
        n_kernels: kernels in the folder.
        processes: that compiled at the same time.
        build_s: seconds of the whole build.
        nbytes: of all files together.
    """

    architectures: str
    n_kernels: int
    processes: int
    build_s: float
    nbytes: int


def kernel_names() -> list[str]:
    """Every kernel of the library: "zvc-4-encode"."""
    from cswap_kernels.cuda.formats import FORMATS

    both = ("encode", "decode")
    return [f"{n}-{w}-{d}" for n, words in FORMATS.items() for w, d in product(words, both)]


def compiled(name: str, architecture: int) -> Cubin:
    """One kernel; runs in a process of its own."""
    from cswap_kernels.cuda.compiler import compile_kernel

    return compile_kernel(name, architecture)


def build(
    folder: Path, names: Sequence[str], architectures: Sequence[int], processes: int | None = None
) -> Row:
    """Compile kernels and write them to a folder for CSWAP_CACHE_DIR.

    Args:
        folder: where they go; made if it is missing.
        names: of the kernels.
        architectures: 90 is sm_90; each kernel is compiled for each.
        processes: that compile at the same time; default: one per core.
    """
    from cswap_kernels.cuda.container import THREADS

    start, jobs = time.perf_counter(), list(product(names, architectures))
    processes = processes or os.cpu_count() or 1
    paths = [cubins.path_of(cubins.key(name, THREADS), sm, folder) for name, sm in jobs]
    for path, cubin in zip(paths, _all(jobs, processes), strict=True):
        cubins.write(path, cubin)
    return Row(
        architectures=", ".join(f"sm_{architecture}" for architecture in architectures),
        n_kernels=len(paths),
        processes=processes,
        build_s=time.perf_counter() - start,
        nbytes=sum(path.stat().st_size for path in paths),
    )


def facts() -> dict[str, object]:
    """The environment of a build, to be asked for before it."""
    compilers = {name: version_of(name) for name in COMPILERS}
    return {**environment(), "compilers": compilers}


def record(path: Path, row: Row, before: dict[str, object]) -> None:
    """Write the result file of a build, whose `facts` were found before."""
    document = {"kind": "gpu build", "version": 1, "environment": before, "rows": [asdict(row)]}
    write(path, document)


def build_table() -> str:
    """How long the committed build took, and the size of its files."""
    data = load(FILE)
    rows = [
        [
            r["architectures"],
            str(r["n_kernels"]),
            str(r["processes"]),
            f"{r['build_s']:.0f}",
            f"{r['nbytes'] / 1e6:.1f}",
        ]
        for r in data["rows"]
    ]
    headings = ["architectures", "kernels", "processes", "seconds", "file, MB"]
    return as_markdown(headings, rows) + "\n\n" + where(data, FILE)


def _all(jobs: Sequence[tuple[str, int]], processes: int) -> Iterator[Cubin]:
    if processes == 1:
        yield from (compiled(*job) for job in jobs)
        return
    # Numba's compiler must not be forked in the middle of another thread's work.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compiled, *zip(*jobs, strict=True))
