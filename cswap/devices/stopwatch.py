"""Marks in the computation of a device, and the seconds between two of them: `Stopwatch`."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol

from cswap import cuda_streams
from cswap.devices.cuda_events import cuda_event

if TYPE_CHECKING:
    import torch


class Stopwatch(Protocol):
    """Takes marks that are its own, and of use to it alone."""

    def is_on(self) -> bool:
        """Whether time passes: not while a CUDA graph is captured."""
        ...

    def mark(self) -> Any:
        """Mark the computation that this thread has issued so far."""
        ...

    def seconds(self, earlier: Any, later: Any) -> float:
        """Seconds of the device from one mark to another; waits until it has come to the later."""
        ...

    def host_seconds(self, earlier: Any, later: Any) -> float:
        """Seconds of the host from one mark to another."""
        ...

    def get_ahead(self, seconds: float) -> None:
        """Let the host be ahead of the device by so much, where it can be."""
        ...


class HostStopwatch:
    """Of a CPU: a mark is the moment at which it was made."""

    mark = staticmethod(time.perf_counter)

    @staticmethod
    def is_on() -> bool:
        """See `Stopwatch`."""
        return True

    @staticmethod
    def seconds(earlier: float, later: float) -> float:
        """See `Stopwatch`."""
        return later - earlier

    host_seconds = seconds

    @staticmethod
    def get_ahead(seconds: float) -> None:
        """See `Stopwatch`."""


class _Mark(NamedTuple):
    event: torch.cuda.Event | None  # None: the watch was off
    came_s: float  # of the host: before this mark
    left_s: float  # and after it


class CudaStopwatch:
    """Of a GPU, which runs behind the host: a mark is an event of the current stream."""

    def __init__(self, index: int) -> None:
        """Args: index: of the device."""
        self._index = index

    @staticmethod
    def is_on() -> bool:
        """See `Stopwatch`."""
        return not cuda_streams.is_capturing()

    def mark(self) -> _Mark:
        """See `Stopwatch`."""
        event, came_s = None, time.perf_counter()
        if not cuda_streams.is_capturing():
            event = cuda_event(timing=True)
            event.record(cuda_streams.current(self._index))
        return _Mark(event, came_s, time.perf_counter())

    @staticmethod
    def seconds(earlier: _Mark, later: _Mark) -> float:
        """See `Stopwatch`; 0.0 if it was off at one of them, or if their streams ran otherwise."""
        if earlier.event is None or later.event is None:
            return 0.0
        earlier.event.synchronize()
        later.event.synchronize()
        return max(0.0, float(earlier.event.elapsed_time(later.event)) / 1e3)

    @staticmethod
    def host_seconds(earlier: _Mark, later: _Mark) -> float:
        """See `Stopwatch`. To mark takes microseconds, which are not the program's."""
        return later.came_s - earlier.left_s

    @staticmethod
    def get_ahead(seconds: float) -> None:
        """See `Stopwatch`."""
        if not cuda_streams.is_capturing():
            cuda_streams.spin(seconds)


HOST: Final = HostStopwatch()
"""The CPU's."""


def stopwatch_of(device: torch.device) -> Stopwatch:
    """The stopwatch of a device."""
    return CudaStopwatch(device.index or 0) if device.type == "cuda" else HOST
