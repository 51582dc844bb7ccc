"""Loads kernels on one device and launches them: `Launcher`.

Numba compiles a kernel when it is first needed. This takes seconds; cubins.py keeps kernels on
disk. The driver launches kernels, which costs a few microseconds.
"""

from __future__ import annotations

import ctypes
import threading
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import cuda_streams
from cswap.codecs import cubins
from cswap.codecs.pinned_sizes import SizePool
from cswap.errors import ConfigError, UnsupportedError
from cswap_kernels.unwatched import unwatched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cswap_kernels.cuda.compiler import Cubin


@dataclass(frozen=True, slots=True)
class LaunchShape:
    """The launch parameters that a tuner chooses.

    Attributes:
        threads: threads per block: 32, 64, ... 1024.
        blocks_per_sm: blocks per multiprocessor. The blocks take tiles in turn.
    """

    threads: int = 256
    blocks_per_sm: int = 4

    def __post_init__(self) -> None:
        if self.threads not in (32, 64, 128, 256, 512, 1024):
            raise ConfigError(f"threads={self.threads}: must be a power of 2 from 32 to 1024.")
        if self.blocks_per_sm < 1:
            raise ConfigError(f"blocks_per_sm={self.blocks_per_sm}: must be at least 1.")


DEFAULT_SHAPE: Final = LaunchShape()

SHAPES: Final[dict[str, LaunchShape]] = {}
"""Launch shapes other than the default, by kernel: "zvc-4-encode"."""

N_SIZES: Final = 1024
"""Number of words that are pinned at once."""

MOST_ARGUMENTS: Final = 16
"""Of a kernel."""

NO_CONTEXT: Final = 0
"""The driver's answer in a thread that has none."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A kernel on a device.

    Attributes:
        function: by the driver's bindings; its address, if CuPy launches it.
        shape: with which it is launched.
    """

    function: Any
    shape: LaunchShape


class Arguments(threading.local):
    """Memory for the arguments of a launch, of each thread: the driver copies them in the call.

    Attributes:
        slots: one number for each.
        address: of the pointers to them.
        bound: whether the thread has the device's context, and keeps it.
    """

    def __init__(self) -> None:
        self.slots = (ctypes.c_uint64 * MOST_ARGUMENTS)()
        first = ctypes.addressof(self.slots)
        addresses = range(first, first + ctypes.sizeof(self.slots), 8)
        self._pointers = (ctypes.c_void_p * MOST_ARGUMENTS)(*addresses)
        self.address = ctypes.addressof(self._pointers)
        self.bound = False


class Launcher:
    """The kernels loaded on one device, and the device memory that they share."""

    def __init__(self, index: int) -> None:
        from cuda.bindings import driver

        self._driver, self._launch_by_cupy = driver, _cupys_launch()
        self.device = torch.device("cuda", index)
        torch.cuda.init()  # type: ignore[no-untyped-call]
        properties = torch.cuda.get_device_properties(index)
        self.architecture = 10 * properties.major + properties.minor
        self._multiprocessors = properties.multi_processor_count
        self._context = self._call(driver.cuDevicePrimaryCtxRetain(index))
        self._kernels: dict[str, Loaded] = {}
        self._is_alone = torch.cuda.device_count() == 1
        self._arguments = Arguments()
        self._lock = threading.Lock()
        self._controls: dict[int, torch.Tensor] = {}
        self.sizes = SizePool(lambda: torch.zeros(N_SIZES, dtype=torch.int64, pin_memory=True))
        self._renew_status()
        self._damage: list[int] = []
        self._retired: list[torch.Tensor] = []
        self._failed: dict[tuple[str, int], UnsupportedError] = {}
        launched[index] = self

    def damage(self) -> Sequence[int]:
        """Damaged tiles that decodes on streams have found so far; the list grows.

        A status word with damage is not cleared or used again, because kernels that were launched
        before may still write it. New launches get a new word.
        """
        if self._noted[0]:
            with self._lock:
                bad = int(self._noted[0])
                if bad:
                    self._damage.append(bad - 1)
                    self._retired.append(self.status)
                    self._renew_status()
        return self._damage

    def _renew_status(self) -> None:
        self.status = pinned_word()
        self._noted = self.status.numpy()  # the same memory, to be read with fewer calls

    def control(self, stream: torch.cuda.Stream | None) -> torch.Tensor:
        """The control words of launches on a stream (zero between them).

        Raises:
            UnsupportedError: a CUDA graph is being captured. Two replays of it at the same time
                would share the words.
        """
        if cuda_streams.is_capturing():
            raise UnsupportedError("CUDA kernels: an encode cannot be captured in a CUDA graph.")
        stream = stream or cuda_streams.current(self.device.index)
        found = self._controls.get(stream.cuda_stream)
        if found is None:
            with torch.cuda.stream(stream):
                found = torch.zeros(2, dtype=torch.int64, device=self.device)
            self._controls[stream.cuda_stream] = found
        return found

    def launch(
        self, name: str, n_tiles: int, values: Sequence[int], stream: torch.cuda.Stream | None
    ) -> None:
        """Launch a kernel by name, with at most one block per tile."""
        shape = SHAPES.get(name, DEFAULT_SHAPE)
        loaded = self._kernels.get(name)
        if loaded is None or loaded.shape != shape:
            loaded = self._load(name, shape)
        stream = stream or cuda_streams.current(self.device.index)
        arguments = self._arguments
        arguments.slots[: len(values)] = list(values)
        n_blocks = max(1, min(n_tiles, shape.blocks_per_sm * self._multiprocessors))
        grid, block = (n_blocks, 1, 1), (shape.threads, 1, 1)
        rest = 0, stream.cuda_stream, arguments.address, 0
        if arguments.bound:
            self._issue(loaded.function, (*grid, *block, *rest))
            return
        with self._own_context():
            self._issue(loaded.function, (*grid, *block, *rest))

    def _issue(self, function: Any, arguments: tuple[Any, ...]) -> None:
        if self._launch_by_cupy is not None:  # in Cython: few calls of Python
            self._launch_by_cupy(function, *arguments)
        else:
            self._call(self._driver.cuLaunchKernel(function, *arguments))

    def _load(self, name: str, shape: LaunchShape) -> Loaded:
        # One thread compiles a kernel; other threads wait for it and take the result.
        with self._lock:
            found = self._kernels.get(name)
            if found is None or found.shape != shape:
                made = self._compile(name, shape)
                with self._own_context():
                    module = self._call(self._driver.cuModuleLoadData(made.code))
                    entry = made.entry.encode()
                    function = self._call(self._driver.cuModuleGetFunction(module, entry))
                if self._launch_by_cupy is not None:
                    function = int(function)
                found = self._kernels[name] = Loaded(function, shape)
            return found

    def _compile(self, name: str, shape: LaunchShape) -> Cubin:
        # A compilation that failed takes seconds, and would fail again. With other threads per
        # block, the kernel may be on disk.
        key = (name, shape.threads)
        if key in self._failed:
            raise self._failed[key]
        try:
            return unwatched(compiled, name, self.architecture, shape.threads)
        except Exception as error:
            failed = UnsupportedError(f"kernel {name}: cannot be compiled: {error}")
            self._failed[key] = failed
            raise failed from error

    @contextmanager
    def _own_context(self) -> Iterator[None]:
        # A thread of our own has no context until the first call that needs one. With several
        # devices, the context is the current device of the user's program, so it is given back.
        before = self._call(self._driver.cuCtxGetCurrent())
        is_own = int(before) == int(self._context)
        if not is_own:
            self._call(self._driver.cuCtxSetCurrent(self._context))
        self._arguments.bound = self._is_alone
        try:
            yield
        finally:
            if not (is_own or self._is_alone or int(before) == NO_CONTEXT):
                self._call(self._driver.cuCtxSetCurrent(before))

    def _call(self, answer: tuple[Any, ...]) -> Any:
        error, *values = answer
        if int(error) != 0:
            raise RuntimeError(f"CUDA driver: {error!r}")
        return values[0] if values else None


def _cupys_launch() -> Callable[..., Any] | None:
    try:
        from cupy.cuda import driver

        found: Callable[..., Any] = driver.launchKernel
    except Exception:  # whatever is wrong with it, the driver's bindings serve
        return None
    return found


def compiled(name: str, architecture: int, threads: int) -> Cubin:
    """The machine code of a kernel: from the cache, else compiled."""
    from cswap_kernels.cuda.compiler import compile_kernel

    return cubins.cached(
        cubins.key(name, threads), architecture, lambda: compile_kernel(name, architecture, threads)
    )


launched: dict[int, Launcher] = {}
"""Launchers by device, of those that have one."""


def pinned_word() -> torch.Tensor:
    """[1] i32, zero: where decode kernels note a damaged tile, for the host to read."""
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)
