"""Machine code of all kernels in one file, made on any machine: `python -m bench gpu build`."""

from __future__ import annotations

import os
import time
from concurrent.futures import ProcessPoolExecutor
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING

from cswap.codecs import cubins

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence
    from pathlib import Path

    from cswap_kernels.cuda.compiler import Cubin


def kernel_names() -> list[str]:
    """Every kernel of the library: "zvc-4-encode"."""
    from cswap_kernels.cuda.formats import ALL_WORDS, FORMATS

    both = ("encode", "decode")
    found = [f"{n}-{w}-{d}" for n, row in FORMATS.items() for w, d in product(row.words, both)]
    return found + [f"profile-{word}-sample" for word in ALL_WORDS]


def compiled(name: str, architecture: int) -> Cubin:
    """One kernel; runs in a process of its own."""
    from cswap_kernels.cuda.compiler import compile_kernel

    return compile_kernel(name, architecture)


def build(
    path: Path, names: Sequence[str], architectures: Sequence[int], processes: int | None = None
) -> float:
    """Compile kernels and write them to a file for CSWAP_KERNELS; the seconds that it took.

    Args:
        path: of the file; replaced if it is there.
        names: of the kernels.
        architectures: 90 is sm_90; each kernel is compiled for each.
        processes: that compile at the same time; default: one per core.
    """
    from cswap_kernels.cuda.compiler import THREADS

    start, jobs = time.perf_counter(), list(product(names, architectures))
    made = {
        (cubins.key(name, THREADS), architecture): cubin
        for (name, architecture), cubin in zip(
            jobs, _all(jobs, processes or os.cpu_count() or 1), strict=True
        )
    }
    cubins.write_file(path, made)
    return time.perf_counter() - start


def _all(jobs: Sequence[tuple[str, int]], processes: int) -> Iterator[Cubin]:
    if processes == 1:
        yield from (compiled(*job) for job in jobs)
        return
    # Numba's compiler must not be forked in the middle of what another thread does.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(compiled, *zip(*jobs, strict=True))
