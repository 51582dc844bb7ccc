"""How fast kernels can be at best, computed without a GPU: `python -m bench gpu static`.

The interpreter runs a kernel's PTX on one and on two tiles. The difference, carried over to machine
code (bench/ptx/count.py), is how many instructions warps execute for a tile. Together with the
bytes that the tile moves, that bounds the rate on a given processor.
"""

from __future__ import annotations

from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from itertools import product
from multiprocessing import get_context
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from bench.ptx.count import executed
from bench.ptx.data import UNSIGNED, words_of_floats
from bench.ptx.device import STREAM, Kernels, interpreted
from bench.ptx.launch import Options
from bench.ptx.machine_code import disassemble
from bench.ptx.runs import TARGETS
from cswap.codecs import gpu
from cswap.codecs.base import EncodeKey, word_dtype
from cswap.codecs.launcher import SHAPES, LaunchShape
from cswap.codecs.registry import get_codec
from cswap.codecs.tiled import TiledCodec
from cswap.cores import usable_cores
from cswap.experiments.files.environment import environment, version_of
from cswap.experiments.files.writing import write
from cswap_kernels.cuda.compiler import Cubin, link
from cswap_kernels.cuda.container import THREADS
from cswap_kernels.tiles import TILE_WORDS

if TYPE_CHECKING:
    from collections import Counter
    from collections.abc import Iterator
    from pathlib import Path

    from bench.ptx.device import Interpreted

ISSUE_SHARE: Final = 0.6
"""Share of the cycles in which a scheduler issues an instruction: assumed, not measured."""

MEMORY_SHARE: Final = 0.9
"""Share of the memory's nominal rate that kernels reach: assumed, not measured."""


@dataclass(frozen=True, slots=True)
class Processor:
    """A GPU, as its vendor describes it.

    Attributes:
        name: of the GPU.
        architecture: 90 is sm_90.
        multiprocessors: of four schedulers each.
        clock_hz: at which they run under load.
        memory_bytes_per_s: nominal rate of device memory.
        shared_bytes: shared memory of a multiprocessor.
    """

    name: str
    architecture: int
    multiprocessors: int
    clock_hz: float
    memory_bytes_per_s: float
    shared_bytes: int

    @property
    def instructions_per_s(self) -> float:
        """Warp instructions that all schedulers together issue at `ISSUE_SHARE`."""
        return 4 * self.multiprocessors * self.clock_hz * ISSUE_SHARE


PROCESSORS: Final = (
    Processor("H200", 90, 132, 1.755e9, 4.8e12, 228 << 10),
    Processor("H100", 90, 132, 1.755e9, 3.35e12, 228 << 10),
    Processor("A100", 80, 108, 1.41e9, 2.039e12, 164 << 10),
)
"""The SXM models; the A100 with 80 GB."""

ZEROS: Final = 0.5
"""Share of zeros in the data of formats that look for them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One kernel of one architecture on one dtype.

    Attributes:
        codec: its name.
        dtype: of the tensor.
        direction: "encode" or "decode".
        kernel: its name.
        architecture: 90 is sm_90.
        registers: per thread.
        local_bytes: of local memory per thread: spills.
        shared_bytes: per block of `THREADS` threads.
        blocks: that fit on a multiprocessor, by processor.
        occupancy: warps of these over the warps that the multiprocessor can hold, by processor.
        data: that the counts are for.
        ratio: raw bytes over encoded bytes of it.
        instructions: that a warp executes per 32 words.
        moved_bytes: that are read and written per word.
        issue_bytes_per_s: raw bytes per second at which `ISSUE_SHARE` is reached, by processor.
        memory_bytes_per_s: raw bytes per second at which `MEMORY_SHARE` is, by processor.
        bound_bytes_per_s: the lower of both, by processor.
    """

    codec: str
    dtype: str
    direction: str
    kernel: str
    architecture: int
    registers: int
    local_bytes: int
    shared_bytes: int
    blocks: dict[str, int]
    occupancy: dict[str, float]
    data: str
    ratio: float
    instructions: float
    moved_bytes: float
    issue_bytes_per_s: dict[str, float]
    memory_bytes_per_s: dict[str, float]
    bound_bytes_per_s: dict[str, float]


COMPILERS: Final = (
    *("numba-cuda", "nvidia-nvvm", "nvidia-nvjitlink", "nvidia-cuda-nvdisasm", "cuda-core"),
)


def names() -> list[str]:
    """Codecs, one for each kernel that takes tensors."""
    return [name for name in TARGETS if ":" not in name]


def run(path: Path, codecs: list[str] | None = None) -> None:
    """Compute the rows of all codecs, or of some, and write them to a result file."""
    architectures = sorted({p.architecture for p in PROCESSORS}, reverse=True)
    jobs = list(product(codecs or names(), architectures))
    where = environment()
    where["compilers"] = {name: version_of(name) for name in COMPILERS}
    document: dict[str, Any] = {
        "kind": "gpu static",
        "version": 1,
        "environment": where,
        "assumed": {
            "issue_share": ISSUE_SHARE,
            "memory_share": MEMORY_SHARE,
            "threads": THREADS,
            "processors": [asdict(p) for p in PROCESSORS],
        },
        "rows": [],
    }
    for found in _all(jobs):
        document["rows"] += found
        for row in found:
            rates = ", ".join(
                f"{name} {rate / 1e9:.0f}" for name, rate in row["bound_bytes_per_s"].items()
            )
            print(f"{row['kernel']} {row['dtype']} sm_{row['architecture']}: {rates} GB/s at most")
    write(path, document)


def _all(jobs: list[tuple[str, int]]) -> Iterator[list[dict[str, Any]]]:
    cores = usable_cores()
    if cores == 1:
        yield from (rows(*job) for job in jobs)
        return
    # Numba's compiler must not be forked in the middle of another thread's work.
    with ProcessPoolExecutor(cores, mp_context=get_context("spawn")) as pool:
        yield from pool.map(rows, *zip(*jobs, strict=True))


def rows(name: str, architecture: int) -> list[dict[str, Any]]:
    """The rows of a codec, as JSON-able values; runs in a process of its own."""
    kernels = Kernels(architecture)
    return [
        asdict(row)
        for dtype in TARGETS[name]
        for row in _Count(kernels, name, dtype).rows(architecture)
    ]


def resident_blocks(cubin: Cubin, processor: Processor) -> int:
    """Blocks of `THREADS` threads that a multiprocessor holds at a time.

    Source of the rules: CUDA C++ Programming Guide, compute capabilities.
    """
    warps = THREADS // 32
    registers = -(-cubin.registers * 32 // 256) * 256  # are given to warps by 256
    shared = cubin.shared_bytes + 1024  # the system's own part of each block
    return min(65536 // registers // warps, processor.shared_bytes // shared, 64 // warps, 32)


class _Count:
    # One codec and dtype.

    def __init__(self, kernels: Kernels, name: str, dtype: torch.dtype) -> None:
        self._kernels, self._name, self._dtype = kernels, name, dtype
        self._codec, self._word = get_codec(name), dtype.itemsize
        self._tile = TILE_WORDS[self._word]
        self._data, self._words = _words(name, dtype, 2 * self._tile)

    def rows(self, architecture: int) -> list[Row]:
        with interpreted(self._kernels) as device:
            one, two = (self._run(device, tiles) for tiles in (1, 2))
        encoded = (two["nbytes"] - one["nbytes"]) / self._tile
        made = []
        for direction in ("encode", "decode"):
            runs = {n: two[direction][n] - one[direction][n] for n in two[direction]}
            made.append(self._row(direction, architecture, encoded, runs))
        return made

    def _run(self, device: Interpreted, tiles: int) -> dict[str, Any]:
        # Encode and decode so many tiles in one block: how often nodes ran, and encoded bytes.
        device.fresh()
        device.options = Options(races=False, counts=True)
        SHAPES.update({self._kernel(d): LaunchShape(THREADS, 1) for d in ("encode", "decode")})
        n = tiles * self._tile
        x = device.tensor(n, self._dtype, fill=0)
        x.view(torch.uint8).numpy()[:] = self._words[:n].view(np.uint8)
        out = device.tensor(self._codec.bound(self._dtype, n), fill=0)
        size = gpu.encode(self._format(), self._word, x, out, self._args(), STREAM)
        nbytes = size.value()
        encode = self._executed(device)
        x_hat = device.tensor(n, self._dtype, fill=0)
        gpu.decode(self._format(), self._word, out[:nbytes], x_hat, self._args(), STREAM)
        return {"nbytes": nbytes, "encode": encode, "decode": self._executed(device)}

    @staticmethod
    def _executed(device: Interpreted) -> Counter[int]:
        report = device.reports.pop()
        device.reports.clear()
        return report.executed

    def _row(self, direction: str, architecture: int, encoded: float, runs: dict[int, int]) -> Row:
        kernel = self._kernels.get(self._kernel(direction), THREADS)
        cubin = link(kernel.text, architecture, lines=True)
        instructions = executed(kernel, disassemble(cubin.code), runs).total * 32 / self._tile
        moved = self._word + encoded
        own = [p for p in PROCESSORS if p.architecture == architecture]
        blocks = {p.name: resident_blocks(cubin, p) for p in own}
        issue = {p.name: p.instructions_per_s / instructions * 32 * self._word for p in own}
        memory = {p.name: p.memory_bytes_per_s * MEMORY_SHARE * self._word / moved for p in own}
        return Row(
            codec=self._name,
            dtype=str(self._dtype).removeprefix("torch."),
            direction=direction,
            kernel=self._kernel(direction),
            architecture=architecture,
            registers=cubin.registers,
            local_bytes=cubin.local_bytes,
            shared_bytes=cubin.shared_bytes,
            blocks=blocks,
            occupancy={name: count * THREADS / 2048 for name, count in blocks.items()},
            data=self._data,
            ratio=self._word / encoded,
            instructions=instructions,
            moved_bytes=moved,
            issue_bytes_per_s=issue,
            memory_bytes_per_s=memory,
            bound_bytes_per_s={name: min(rate, memory[name]) for name, rate in issue.items()},
        )

    def _format(self) -> str:
        return self._codec.cuda_format if isinstance(self._codec, TiledCodec) else "zfp"

    def _kernel(self, direction: str) -> str:
        return f"{self._format()}-{self._word}-{direction}"

    def _args(self) -> list[int]:
        d = word_dtype(self._dtype)
        if isinstance(self._codec, TiledCodec):
            return [int(a) for a in self._codec.cuda_args(d, EncodeKey())]
        return list(self._codec._cuda_args(d))  # type: ignore[attr-defined] # noqa: SLF001


def _words(name: str, dtype: torch.dtype, n: int) -> tuple[str, Any]:
    # Values that the codec is for, and their name.
    rng = np.random.default_rng(0)
    if dtype.is_floating_point:
        values = rng.normal(size=n)
        if not name.startswith(("zvc", "csr", "rle")):
            return "normal", words_of_floats(values, dtype)
        values[rng.random(n) < ZEROS] = 0
        return f"{100 * ZEROS:.0f} % zeros", words_of_floats(values, dtype)
    small = rng.integers(1, 2 if dtype == torch.bool else 100, n)
    if dtype in (torch.bool, torch.uint8) or name.startswith("zvc"):
        small[rng.random(n) < ZEROS] = 0
        return f"{100 * ZEROS:.0f} % zeros", small.astype(UNSIGNED[dtype.itemsize])
    bits = min(8 * dtype.itemsize - 1, 16)
    return f"{bits} bits", rng.integers(0, 1 << bits, n).astype(UNSIGNED[dtype.itemsize])
