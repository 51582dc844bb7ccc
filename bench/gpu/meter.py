"""Questions of a benchmark to the device that it measures: its time, its memory, its streams.

`CudaMeter` is the only one that results come from. The class above it is there so that the
benchmarks' own code can be tried on a machine without a GPU.
"""

from __future__ import annotations

import abc
import gc
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Final

import torch

from cswap.experiments.timing import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Callable

FLUSH_OF_L2: Final = 4
"""Sizes of the L2 cache written between two measurements; that also hides a launch's latency."""

FEWEST, MOST = 5, 100
"""Repetitions of a measurement, within its time."""

N_LAUNCHES: Final = 30


@dataclass(frozen=True, slots=True)
class Memory:
    """Peaks since `Meter.isolate`, in bytes.

    Attributes:
        allocated: of tensors on the device.
        reserved: bytes that the allocator took of the device for them.
        pinned: page-locked host memory, as torch's allocator rounds it; None if it does not say.
    """

    allocated: int
    reserved: int
    pinned: int | None


class Meter(abc.ABC):
    """Measures one device.

    Attributes:
        device: of all tensors.
        stream: for the codecs.
        pins: whether host memory can be page-locked.
    """

    device: torch.device
    stream: torch.cuda.Stream | None
    pins: bool

    @abc.abstractmethod
    def time_s(self, run: Callable[[], object], *, within_s: float) -> Timing:
        """Device seconds of one run, cold caches; as many repetitions as fit into within_s."""

    @abc.abstractmethod
    def flush(self) -> None:
        """Remove the last measurement's data from the device's caches."""

    @abc.abstractmethod
    def synchronize(self) -> None:
        """Wait until the device has done everything."""

    @abc.abstractmethod
    def beside(self, *runs: Callable[[], object]) -> None:
        """Run these at the same time, each on a stream of its own."""

    @abc.abstractmethod
    def isolate(self) -> None:
        """Forget the traces of earlier measurements in caches and peaks."""

    @abc.abstractmethod
    def memory(self) -> Memory:
        """Peaks since `isolate`."""

    def pinned(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 of host memory, page-locked if that is possible."""
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=self.pins)

    def launch_us(self, run: Callable[[], object]) -> float:
        """Median microseconds that the host needs to call run, without waiting for the device."""
        seconds = []
        for _ in range(N_LAUNCHES):
            self.synchronize()
            start = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - start)
        self.synchronize()
        return 1e6 * timing_of(seconds).median_s


class CudaMeter(Meter):
    """Measures a GPU: time by CUDA events, memory by torch's allocator."""

    pins = True

    def __init__(self, index: int = 0) -> None:
        """Args: index: torch's index of the device."""
        self.device = torch.device("cuda", index)
        torch.cuda.set_device(self.device)
        self.stream = torch.cuda.current_stream(self.device)
        self._flush_bytes = FLUSH_OF_L2 * torch.cuda.get_device_properties(index).L2_cache_size
        self._flushed: torch.Tensor | None = None
        self._beside = [torch.cuda.Stream(self.device) for _ in range(2)]

    def time_s(self, run: Callable[[], object], *, within_s: float) -> Timing:
        """See `Meter.time_s`."""
        run()  # compilation and allocation on first use are not measured
        self.flush()
        self.synchronize()
        start_s = time.perf_counter()
        run()
        self.synchronize()
        n = repetitions(time.perf_counter() - start_s, within_s)
        pairs = [(_event(), _event()) for _ in range(n)]
        for start, end in pairs:
            self.flush()
            start.record()
            run()
            end.record()
        self.synchronize()
        return timing_of([start.elapsed_time(end) / 1e3 for start, end in pairs])

    def flush(self) -> None:
        """See `Meter.flush`."""
        if self._flushed is None:
            self._flushed = torch.empty(self._flush_bytes, dtype=torch.uint8, device=self.device)
        self._flushed.zero_()

    def synchronize(self) -> None:
        """See `Meter.synchronize`."""
        torch.cuda.synchronize(self.device)

    def beside(self, *runs: Callable[[], object]) -> None:
        """See `Meter.beside`."""
        current = torch.cuda.current_stream(self.device)
        for stream, run in zip(self._beside, runs, strict=True):
            stream.wait_stream(current)
            with torch.cuda.stream(stream):
                run()
        for stream in self._beside:
            current.wait_stream(stream)

    def isolate(self) -> None:
        """See `Meter.isolate`."""
        self._flushed = None
        gc.collect()
        self.synchronize()
        torch.cuda.empty_cache()
        empty_host_cache = getattr(torch._C, "_host_emptyCache", None)  # noqa: SLF001 - no other way
        if empty_host_cache is not None:
            empty_host_cache()
        torch.cuda.reset_peak_memory_stats(self.device)
        if hasattr(torch.cuda.memory, "reset_peak_host_memory_stats"):
            torch.cuda.memory.reset_peak_host_memory_stats()

    def memory(self) -> Memory:
        """See `Meter.memory`."""
        pinned = None
        if hasattr(torch.cuda.memory, "host_memory_stats"):
            pinned = torch.cuda.memory.host_memory_stats().get("allocated_bytes.peak")
        return Memory(
            allocated=torch.cuda.max_memory_allocated(self.device),
            reserved=torch.cuda.max_memory_reserved(self.device),
            pinned=pinned,
        )


def repetitions(one_s: float, within_s: float) -> int:
    """How often something that takes one_s is measured within within_s.

    >>> repetitions(0.01, 0.2), repetitions(5.0, 0.2), repetitions(1e-6, 0.2)
    (20, 5, 100)
    """
    return max(FEWEST, min(MOST, int(within_s / max(one_s, 1e-9))))


def rss_bytes() -> int:
    """Host memory that this process has in use; 0 where /proc does not say."""
    statm = Path("/proc/self/statm")
    if not statm.exists():
        return 0
    return int(statm.read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)
