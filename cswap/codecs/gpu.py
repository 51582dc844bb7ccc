"""Launches the CUDA twins: runs the kernel of a format on tensors, on a stream.

Numba compiles a kernel when it is first needed. This takes seconds; cubins.py keeps kernels on disk
or takes precompiled ones. The driver launches kernels, which costs a few microseconds. The module
never waits for the device, with one exception: a decode without a stream waits, because it has to
report damage.
"""

from __future__ import annotations

import ctypes
import importlib
import threading
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import cuda_streams
from cswap.codecs import cubins
from cswap.errors import ConfigError, CorruptEncodingError, UnsupportedError
from cswap_kernels.unwatched import unwatched

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    import numpy as np
    from numpy.typing import NDArray

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

N_ARGS: Final = 4

N_COUNTS: Final = 17
"""Number of counts in a profile, see `cswap_kernels.profile`."""

_on_stream = torch.cuda.stream

MOST_ARGUMENTS: Final = 16
"""Of a kernel."""

TRIAL: Final = "profile-4-sample"
"""The kernel that is compiled to test the compiler; profiling needs it anyway."""

_NEEDED: Final = ("cuda.core", "numba.cuda.extending", "cswap_kernels.cuda.formats")


@cache
def missing() -> str | None:
    """The reason why kernels cannot run here; None if they can."""
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    try:
        for module in _NEEDED:
            unwatched(importlib.import_module, module)
    except ImportError as error:
        return f"numba-cuda is missing or too old ({error}); pip install 'cswap[cuda13]'"
    return _cannot_compile()


def _cannot_compile() -> str | None:
    # One kernel is a sufficient test: without libnvvm or nvJitLink, every kernel would fail, each
    # after seconds.
    major, minor = torch.cuda.get_device_capability()
    try:
        unwatched(_compiled, TRIAL, 10 * major + minor, DEFAULT_SHAPE.threads)
    except Exception as error:
        return (
            f"kernels cannot be compiled here ({type(error).__name__}: {error}); "
            "pip install 'numba-cuda[cu13]', or [cu12] with CUDA 12"
        )
    return None


@cache
def has_kernels(format_name: str, word: int) -> bool:
    """Whether this format's CUDA twin can run here on words of ``word`` bytes."""
    if missing() is not None:
        return False
    from cswap_kernels.cuda.formats import FORMATS

    return format_name in FORMATS and word in FORMATS[format_name].words


def encode(
    format_name: str,
    word: int,
    x: torch.Tensor,
    out: torch.Tensor,
    args: Sequence[int],
    stream: torch.cuda.Stream | None,
) -> PinnedSize:
    """Launch an encode of x into out; the size is known when the stream has run it.

    An encode cannot be part of a CUDA graph, see `_Launcher.control`.

    Args:
        format_name: a key of `cswap_kernels.cuda.formats.FORMATS`.
        word: bytes per word.
        x: [n] flat, on the device.
        out: uint8, 16-byte aligned, on the device or pinned on the host, of the codec's bound.
        args: the format's parameters, at most four.
        stream: CUDA stream; default: the current stream.

    Raises:
        UnsupportedError: a CUDA graph is being captured, or the kernel cannot be compiled.
    """
    launcher = _launcher(x.device.index)
    size = launcher.sizes.take()
    n_words = x.nbytes // word
    values = (
        x.data_ptr(),
        out.data_ptr(),
        launcher.control(stream).data_ptr(),
        size.address,
        n_words,
        0,
        int(x.data_ptr() % 16 == 0),
        *_padded(args),
    )
    n_tiles = _count_tiles(n_words, word)
    launcher.launch(f"{format_name}-{word}-encode", n_tiles, values, stream)
    return size


def decode(
    format_name: str,
    word: int,
    payload: torch.Tensor,
    out: torch.Tensor,
    args: Sequence[int],
    stream: torch.cuda.Stream | None,
) -> None:
    """Launch a decode of payload [nbytes] into out [n].

    Without a stream, the call waits for the decode and raises an error for damage. With a stream,
    it does not wait, and `damage` reports damaged tiles later.

    Raises:
        CorruptEncodingError: a tile is damaged.
    """
    launcher = _launcher(out.device.index)
    n_words = out.nbytes // word
    # Kernels read whole groups of 16 bytes.
    nbytes = payload.numel()
    if payload.data_ptr() % 16 or nbytes % 16:
        payload = _aligned(payload, stream)
    status = launcher.status if stream is not None else _pinned_word()
    values = (
        payload.data_ptr(),
        nbytes,
        out.data_ptr(),
        status.data_ptr(),
        n_words,
        int(out.data_ptr() % 16 == 0),
        *_padded(args),
    )
    n_tiles = _count_tiles(n_words, word)
    launcher.launch(f"{format_name}-{word}-decode", n_tiles, values, stream)
    if stream is None:
        wait(out.device)
        bad = int(status.item())
        if bad:
            raise CorruptEncodingError(f"format {format_name!r}: tile {bad - 1} is damaged.")


def profile(
    x: torch.Tensor, word: int, pieces: int, piece_words: int, layout: Sequence[int]
) -> torch.Tensor:
    """Launch the profiler on the current stream; return [17] i64 pinned counts.

    The counts are valid when the stream has run the profiler.

    Args:
        x: [n] flat, on the device.
        word: bytes per word.
        pieces: number of sampled pieces, spread evenly.
        piece_words: words of each piece.
        layout: see `cswap_kernels.profile`.
    """
    launcher = _launcher(x.device.index)
    n_words = x.nbytes // word
    counts = torch.zeros(N_COUNTS, dtype=torch.int64, device=x.device)
    step = max(piece_words, n_words // pieces)
    values = (x.data_ptr(), counts.data_ptr(), n_words, pieces, piece_words, step, *layout)
    launcher.launch(f"profile-{word}-sample", pieces, values, None)
    arrived = torch.empty(N_COUNTS, dtype=torch.int64, pin_memory=True)
    return arrived.copy_(counts, non_blocking=True)


def wait(device: torch.device) -> None:
    """Block until the device's current stream has run all launched work."""
    torch.cuda.current_stream(device).synchronize()


def damage(index: int) -> Sequence[int]:
    """Indices of damaged tiles that decodes on this device's streams have found in this process.

    The list grows. Decodes that have not run yet are not included. The call never waits.
    """
    launcher = _launched.get(index)
    return () if launcher is None else launcher.damage()


def _aligned(payload: torch.Tensor, stream: torch.cuda.Stream | None) -> torch.Tensor:
    # The copy is allocated on the stream that reads it, because it is freed before the kernel runs.
    with _on_stream(stream):
        nbytes = payload.numel()
        padded = torch.zeros(-(-nbytes // 16) * 16, dtype=torch.uint8, device=payload.device)
        padded[:nbytes] = payload
        return padded


class PinnedSize:
    """A `LateSize`: a word of pinned memory that the encode kernel writes."""

    __slots__ = ("_pool", "_slot", "_value")

    def __init__(self, pool: SizePool, slot: _Slot) -> None:
        self._pool = pool
        self._slot: _Slot | None = slot
        self._value = 0

    @property
    def address(self) -> int:
        """Address of the word; 0 after its value was read."""
        return 0 if self._slot is None else self._slot.address

    def value(self) -> int:
        """See `LateSize.value`."""
        slot = self._slot
        if slot is not None:  # in this order: an interrupt leaves it to the next call
            self._value = int(slot.numbers[slot.index])
            self._slot = None
            self._pool.give_back(slot)
        return self._value


@dataclass(frozen=True, slots=True)
class _Slot:
    numbers: NDArray[np.int64]
    index: int

    @property
    def address(self) -> int:
        return int(self.numbers.ctypes.data) + 8 * self.index


class SizePool:
    """Pinned words for sizes. A word dropped unread is not reused: a kernel may still write it."""

    def __init__(self, allocate: Callable[[], torch.Tensor]) -> None:
        """Args: allocate: returns [k] i64, pinned."""
        self._allocate = allocate
        self._lock = threading.Lock()
        self._free: list[_Slot] = []

    def take(self) -> PinnedSize:
        """Take a free word."""
        with self._lock:
            if not self._free:
                numbers = self._allocate().numpy()
                self._free = [_Slot(numbers, i) for i in range(numbers.size)]
            return PinnedSize(self, self._free.pop())

    def give_back(self, slot: _Slot) -> None:
        """Return a word after its value was read."""
        with self._lock:
            self._free.append(slot)


@dataclass(frozen=True, slots=True)
class _Loaded:
    # function: by the driver's bindings; its address, if CuPy launches it.
    function: Any
    shape: LaunchShape


class _Arguments(threading.local):
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


class _Launcher:
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
        self._kernels: dict[str, _Loaded] = {}
        self._is_alone = torch.cuda.device_count() == 1
        self._arguments = _Arguments()
        self._lock = threading.Lock()
        self._controls: dict[int, torch.Tensor] = {}
        self.sizes = SizePool(lambda: torch.zeros(N_SIZES, dtype=torch.int64, pin_memory=True))
        self._renew_status()
        self._damage: list[int] = []
        self._retired: list[torch.Tensor] = []
        self._failed: dict[tuple[str, int], UnsupportedError] = {}
        _launched[index] = self

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
        self.status = _pinned_word()
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
        self._bind()
        n_blocks = max(1, min(n_tiles, shape.blocks_per_sm * self._multiprocessors))
        grid, block = (n_blocks, 1, 1), (shape.threads, 1, 1)
        rest = 0, stream.cuda_stream, arguments.address, 0
        if self._launch_by_cupy is not None:  # in Cython: few calls of Python
            self._launch_by_cupy(loaded.function, *grid, *block, *rest)
            return
        self._call(self._driver.cuLaunchKernel(loaded.function, *grid, *block, *rest))

    def _load(self, name: str, shape: LaunchShape) -> _Loaded:
        # One thread compiles a kernel; other threads wait for it and take the result.
        with self._lock:
            found = self._kernels.get(name)
            if found is None or found.shape != shape:
                made = self._compile(name, shape)
                self._bind()
                module = self._call(self._driver.cuModuleLoadData(made.code))
                function = self._call(self._driver.cuModuleGetFunction(module, made.entry.encode()))
                if self._launch_by_cupy is not None:
                    function = int(function)
                found = self._kernels[name] = _Loaded(function, shape)
            return found

    def _compile(self, name: str, shape: LaunchShape) -> Cubin:
        # A compilation that failed takes seconds, and would fail again. With other threads per
        # block, the kernel may be in the file of CSWAP_KERNELS.
        key = (name, shape.threads)
        if key in self._failed:
            raise self._failed[key]
        try:
            return unwatched(_compiled, name, self.architecture, shape.threads)
        except Exception as error:
            failed = UnsupportedError(f"kernel {name}: cannot be compiled: {error}")
            self._failed[key] = failed
            raise failed from error

    def _bind(self) -> None:
        # Threads of our own have no context until the first call that needs one. With several
        # devices, torch gives a thread another one whenever it is told to.
        if self._arguments.bound:
            return
        if int(self._call(self._driver.cuCtxGetCurrent())) != int(self._context):
            self._call(self._driver.cuCtxSetCurrent(self._context))
        self._arguments.bound = self._is_alone

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


def _compiled(name: str, architecture: int, threads: int) -> Cubin:
    from cswap_kernels.cuda.compiler import compile_kernel

    return cubins.cached(
        cubins.key(name, threads), architecture, lambda: compile_kernel(name, architecture, threads)
    )


_launched: dict[int, _Launcher] = {}
"""Launchers by device, of those that have one."""


def _pinned_word() -> torch.Tensor:
    # [1] i32, zero: where decode kernels note a damaged tile, for the host to read.
    return torch.zeros(1, dtype=torch.int32, pin_memory=True)


@cache
def _launcher(index: int) -> _Launcher:
    reason = missing()
    if reason is not None:
        raise UnsupportedError(f"CUDA kernels: {reason}.")
    return _Launcher(index)


def _count_tiles(n_words: int, word: int) -> int:
    from cswap_kernels.tiles import count_tiles

    return count_tiles(n_words, word)


def _padded(args: Sequence[int]) -> Iterator[int]:
    yield from args
    yield from [0] * (N_ARGS - len(args))
