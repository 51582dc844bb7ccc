"""From a kernel to a cubin, with or without a GPU.

Numba compiles to PTX, NVIDIA's linker to machine code of one architecture. Neither needs a driver.
cswap/codecs/cubins.py keeps the machine code on disk.
"""

from __future__ import annotations

import hashlib
import re
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

from cswap_kernels.cuda.container import THREADS

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

ARCHITECTURES: Final = (75, 80, 86, 89, 90, 100, 120)
"""The tested ones: Turing to Blackwell. Volta (70) needs the toolkit of CUDA 12."""

MIN_BLOCKS: Final = 4
"""Blocks per multiprocessor that a kernel's registers must leave room for."""


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one kernel.

    Attributes:
        code: the cubin.
        entry: name of the kernel in it.
        registers: per thread.
        local_bytes: of local memory (stack and spills) per thread.
        shared_bytes: of shared memory per block.
    """

    code: bytes
    entry: str
    registers: int
    local_bytes: int
    shared_bytes: int


def compile_ptx(
    kernel: Callable[..., None], signature: Any, cc: int = ARCHITECTURES[0], threads: int = THREADS
) -> str:
    """PTX of a kernel for compute capability ``cc`` (75 is 7.5) and later."""
    from numba import cuda

    bounds = (threads, max(1, MIN_BLOCKS * THREADS // threads))
    with _current_device(cc):
        ptx, _ = cuda.compile_ptx(kernel, signature, cc=divmod(cc, 10), launch_bounds=bounds)
    return str(ptx)


@contextmanager
def _current_device(cc: int) -> Iterator[None]:
    # Numba compiles a kernel for a given device, but the device functions that it calls for the
    # current one, for which there must be a driver. Having all of them inlined at the level of
    # Numba's IR, which needs no device, takes ten times as long. NVVM inlines them in either case.
    from numba.cuda import dispatcher

    real = dispatcher.get_current_device
    dispatcher.get_current_device = lambda: SimpleNamespace(compute_capability=divmod(cc, 10))
    try:
        yield
    finally:
        dispatcher.get_current_device = real


def link(ptx: str, architecture: int, *, lines: bool = False) -> Cubin:
    """Machine code for ``architecture`` (90 is sm_90) from PTX of it or an earlier one.

    Args:
        ptx: of one kernel.
        architecture: to link for.
        lines: whether the machine code is to say which line of the PTX each instruction is from.

    Raises:
        RuntimeError: the linker refuses, or its report is not understood.
    """
    from cuda.core import Linker, LinkerOptions, ObjectCode

    # One rounding per operation, as on a CPU: a product and a sum stay two. The linker's own option
    # ``fma`` is for what it compiles itself; PTX it hands to ptxas.
    ptxas = ["-v", "-fmad=false", *(["--generate-line-info"] if lines else [])]
    options = LinkerOptions(arch=f"sm_{architecture}", ptxas_options=ptxas)
    linker = Linker(ObjectCode.from_ptx(ptx.encode()), options=options)
    code = linker.link("cubin").code
    report = str(linker.get_info_log())
    entry = re.search(r"\.entry (\w+)", ptx)
    used = re.search(r"Used (\d+) registers", report)
    stack = re.search(r"(\d+) bytes stack frame", report)
    shared = re.findall(r"\.shared \.align \d+ \.b8 \w+\[(\d+)\]", ptx)
    if entry is None or used is None or stack is None:
        raise RuntimeError(f"unexpected report of the linker for sm_{architecture}: {report[:500]}")
    return Cubin(bytes(code), entry[1], int(used[1]), int(stack[1]), sum(map(int, shared)))


@cache
def sources() -> str:
    """Digest of the files that kernels are made of."""
    digest, here = hashlib.sha256(), Path(__file__).parent
    for source in sorted([*here.glob("*.py"), *here.parent.glob("*.py")]):
        digest.update(source.read_bytes())
    return digest.hexdigest()[:16]


def compile_kernel(name: str, architecture: int, threads: int = THREADS) -> Cubin:
    """Machine code of a kernel by its name, "zvc-4-encode", for blocks of so many threads."""
    from cswap_kernels.cuda import formats

    format_name, word, direction = name.rsplit("-", 2)
    kernel, signature = formats.kernel(format_name, int(word), direction)
    newest = max(a for a in ARCHITECTURES if a <= architecture)
    return link(compile_ptx(kernel, signature, newest, threads), architecture)
