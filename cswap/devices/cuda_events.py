"""Events of a CUDA device.

Note [events are used again]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
An event is recorded on one stream only. So when it is recorded again, whoever still waits for its
earlier point waits for a later one of the same stream: longer, but not for less.
"""

from __future__ import annotations

import weakref
from typing import Protocol

import torch


class Clock(Protocol):
    """Knows a moment on the device's clock and on the host's."""

    @property
    def origin(self) -> tuple[torch.cuda.Event, float]:
        """An event with timing that has fired, and `time.perf_counter` of it, in seconds."""
        ...


class CudaEvent:
    """Fires when the device has run the job; settles when the callbacks have run, too.

    Attributes:
        recorded: torch's event.
        stream: that it was recorded on.
        error: raised by the job while it issued its work.
        pending: callbacks that have not run yet.
        gone: gives torch's event back when this object goes.
    """

    __slots__ = (
        "__weakref__",
        "_clock",
        "_started",
        "error",
        "gone",
        "pending",
        "recorded",
        "stream",
    )

    gone: Gone

    def __init__(self, clock: Clock, recorded: torch.cuda.Event, stream: torch.cuda.Stream) -> None:
        self._clock = clock
        self._started: torch.cuda.Event | None = None
        self.recorded = recorded
        self.stream = stream
        self.error: BaseException | None = None
        self.pending = 0

    def query(self) -> bool:
        """See `Event.query`."""
        return bool(self.recorded.query())  # type: ignore[no-untyped-call]

    @property
    def measured(self) -> bool:
        """See `Event.measured`."""
        return self._started is not None

    @property
    def elapsed_s(self) -> float:
        """See `Event.elapsed_s`."""
        return 0.0 if self._started is None else self._started.elapsed_time(self.recorded) / 1e3

    @property
    def span_s(self) -> tuple[float, float]:
        """See `Event.span_s`: by the moment at which the host knew the device's clock."""
        if self._started is None:
            return 0.0, 0.0
        event, at_s = self._clock.origin
        return (
            at_s + event.elapsed_time(self._started) / 1e3,
            at_s + event.elapsed_time(self.recorded) / 1e3,
        )

    def start(self) -> None:
        """The job begins here on the stream; its time is measured."""
        self._started = cuda_event(timing=True)
        self._started.record(self.stream)


class Gone(weakref.ref[CudaEvent]):
    """Is put on a list when its event goes; no Python code runs where that happens.

    Attributes:
        recorded: torch's event; missing: an interrupt came before it was set.
    """

    __slots__ = ("recorded",)

    recorded: torch.cuda.Event


def cuda_event(*, timing: bool = False) -> torch.cuda.Event:
    """One of torch's events. A thread that waits for it sleeps instead of spinning."""
    return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]
