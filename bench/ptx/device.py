"""The library's own way to a kernel (cswap/codecs/launcher.py), with the interpreter as its driver.

A launch's arguments are read back from the argument block that it makes, slot by slot, cut to
the sizes that the PTX declares. So argument order, sizes and launch shapes are checked as well.
"""

from __future__ import annotations

import ctypes
import re
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

import numpy as np
import torch

from bench.ptx.grid import run_blocks
from bench.ptx.kernel import Kernel
from bench.ptx.launch import Launch, Options
from bench.ptx.memory import Memory
from bench.ptx.parse import DTYPE
from cswap.codecs import gpu
from cswap.codecs.launcher import DEFAULT_SHAPE, SHAPES, Arguments, Launcher, LaunchShape, Loaded
from cswap.codecs.pinned_sizes import SizePool

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from bench.ptx.launch import Report

THREADS: Final = 256
"""Per block, for which kernels are compiled; only .maxntid differs for others."""


class OneThread:
    """A stream of a CPU device for codecs: encodes and decodes run on the calling thread."""

    threads = 1


class _Stream:
    # Stands for a CUDA stream.
    cuda_stream = 7

    def synchronize(self) -> None:
        """Every launch has ended when it returns."""


STREAM: Final[Any] = _Stream()
"""The one stream of the device."""


class Kernels:
    """Kernels by name and threads per block, compiled once for one architecture."""

    def __init__(self, architecture: int) -> None:
        self.architecture = architecture
        self._texts: dict[str, str] = {}
        self._kernels: dict[tuple[str, int], Kernel] = {}

    def ptx(self, name: str) -> str:
        """PTX for blocks of `THREADS`."""
        from cswap_kernels.cuda import compiler, formats

        if name not in self._texts:
            format_name, word, direction = name.rsplit("-", 2)
            function, signature = formats.kernel(format_name, int(word), direction)
            text = compiler.compile_ptx(function, signature, self.architecture, THREADS)
            self._texts[name] = text
        return self._texts[name]

    def get(self, name: str, threads: int) -> Kernel:
        """The kernel for blocks of so many threads."""
        if (name, threads) not in self._kernels:
            text = re.sub(r"\.maxntid \d+", f".maxntid {threads}", self.ptx(name))
            self._kernels[name, threads] = Kernel(text)
        return self._kernels[name, threads]

    def replace(self, name: str, text: str) -> None:
        """Let other PTX be the kernel of that name."""
        self._texts[name] = text
        self._kernels = {key: k for key, k in self._kernels.items() if key[0] != name}


class _Driver:
    # The functions of cuda.bindings.driver that launcher.py calls.

    def __init__(self, device: Interpreted) -> None:
        self._device = device

    def cuCtxGetCurrent(self) -> tuple[int, int]:  # noqa: N802
        return 0, 1

    def cuLaunchKernel(self, function: Kernel, *rest: Any) -> tuple[int]:  # noqa: N802
        gx, gy, gz, bx, by, bz, shared, _stream, pointers, extra = rest
        if (gy, gz, by, bz, shared, extra) != (1, 1, 1, 1, 0, 0):
            raise ValueError(f"unexpected launch: {rest}")
        sizes = [DTYPE[kind].itemsize for _, kind in function.module.params]
        slots = (ctypes.c_void_p * len(sizes)).from_address(pointers)
        values = [
            int.from_bytes(ctypes.string_at(slots[k] or 0, size), "little")
            for k, size in enumerate(sizes)
        ]
        self._device.run(function, gx, bx, values)
        return (0,)


class Interpreted(Launcher):
    """A device whose kernels the interpreter runs.

    Attributes:
        memory: its global memory.
        options: how launches run.
        reports: of the launches, until `fresh`.
        launched: (blocks, threads) of the last one.
    """

    def __init__(self, kernels: Kernels, nbytes: int = 8 << 20) -> None:
        self._driver: Any = _Driver(self)
        self._launch_by_cupy, self._is_alone = None, True
        self._arguments = Arguments()
        self._context: Any = 1
        self.device, self.architecture = torch.device("cpu"), kernels.architecture
        self._multiprocessors = 1
        self._kernels, self._lock = {}, threading.Lock()
        self.kernels, self.memory, self.options = kernels, Memory(nbytes), Options()
        self.launched = (0, 0)
        self.fresh()

    def fresh(self) -> None:
        """Forget all memory and all reports."""
        self.memory.reset()
        self._kernels.clear()
        self._controls = {}
        self.sizes = SizePool(lambda: self.tensor(2, torch.int64, fill=0))
        self.status = self.tensor(1, torch.int32, fill=0)
        self.reports: list[Report] = []

    def tensor(
        self, numel: int, dtype: torch.dtype = torch.uint8, fill: int | None = None
    ) -> torch.Tensor:
        """A tensor [numel] in the device's memory; junk that counts as unwritten if no fill."""
        made = self.memory.allocate(numel * dtype.itemsize, 0, fill)
        return torch.from_numpy(made.data).view(dtype)

    def run(self, kernel: Kernel, grid: int, threads: int, values: Sequence[int]) -> None:
        """Launch, and keep the report."""
        self.launched = grid, threads
        launch = Launch(kernel, self.memory, grid, threads, values, self.options)
        self.reports.append(run_blocks(launch))

    def control(self, stream: Any) -> torch.Tensor:
        """See launcher.py: zero between launches."""
        if stream.cuda_stream not in self._controls:
            self._controls[stream.cuda_stream] = self.tensor(2, torch.int64, fill=0)
        return self._controls[stream.cuda_stream]

    def launch(self, name: str, n_tiles: int, values: Sequence[int], stream: Any) -> None:
        """See launcher.py; the number of arguments must be that of the kernel's parameters."""
        shape = SHAPES.get(name, DEFAULT_SHAPE)
        declared = self.kernels.get(name, shape.threads).module.params
        if len(values) != len(declared):
            raise ValueError(f"{name}: {len(values)} arguments, {len(declared)} parameters")
        super().launch(name, n_tiles, values, stream)

    def _load(self, name: str, shape: LaunchShape) -> Any:
        return Loaded(self.kernels.get(name, shape.threads), shape)


class _Torch:
    # torch, but the memory that gpu.py allocates is the interpreter's.

    class cuda:  # noqa: N801
        @staticmethod
        def current_stream(_device: object = None) -> Any:
            return STREAM

    def __init__(self, device: Interpreted) -> None:
        self._device = device

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)

    def zeros(self, shape: int, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return self._device.tensor(int(np.prod(shape)), dtype, fill=0)

    def empty(self, shape: int, *, dtype: torch.dtype, **_: Any) -> torch.Tensor:
        return self._device.tensor(int(np.prod(shape)), dtype)


@contextmanager
def interpreted(kernels: Kernels, nbytes: int = 8 << 20) -> Iterator[Interpreted]:
    """Let gpu.py launch kernels in the interpreter, on memory of it, meanwhile.

    Only `gpu.encode` and `gpu.decode` may be used, with tensors of `memory`.
    """
    device = Interpreted(kernels, nbytes)
    shapes = dict(SHAPES)
    names = ("torch", "pinned_word", "_launcher")
    before = {name: getattr(gpu, name) for name in names}
    replaced = (_Torch(device), lambda: device.tensor(1, torch.int32, fill=0), lambda _: device)
    try:
        for name, value in zip(names, replaced, strict=True):
            setattr(gpu, name, value)
        SHAPES.clear()
        yield device
    finally:
        for name, value in before.items():
            setattr(gpu, name, value)
        SHAPES.clear()
        SHAPES.update(shapes)
