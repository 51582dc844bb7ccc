"""The engine's timeline: every pack, encode, copy, decode and wait of the recorded steps.

Exported as a Chrome trace (chrome://tracing, https://ui.perfetto.dev). Recording is off unless
`SwapEngine.trace` is entered. It costs a few microseconds per job, and memory.
"""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, Literal

from cswap import chrome_trace

if TYPE_CHECKING:
    import os

Track = Literal["compute", "codec", "d2h", "h2d"]

TRACKS: Final[tuple[Track, ...]] = ("compute", "codec", "d2h", "h2d")
FORMAT: Final = "cswap-timeline"
VERSION: Final = 1


@dataclass(frozen=True, slots=True)
class SavedTensor:
    """The tensor of an event.

    Attributes:
        position: its position among the tensors saved in its step.
        step: number of the step.
        saved_in: module, operator or autograd node that saved it.
    """

    position: int
    step: int
    saved_in: str

    def to_dict(self) -> dict[str, Any]:
        """The arguments of a Chrome event."""
        return {"position": self.position, "step": self.step, "saved in": self.saved_in}


class Timeline:
    """Events of some steps. Thread-safe; times are `time.perf_counter`'s, in seconds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._events: list[dict[str, Any]] = []
        self._begin_s, self._end_s = time.perf_counter(), 0.0

    def end(self) -> None:
        """Nothing more is recorded."""
        self._end_s = time.perf_counter()

    def job(
        self,
        name: str,
        track: Track,
        tensor: SavedTensor,
        span_s: tuple[float, float],
        codec: str,
        nbytes: int,
    ) -> None:
        """Add a finished job of a swap; a job without known times is left out."""
        start, end = span_s
        if end > start > 0:
            about = {"codec": codec, "bytes": nbytes, **tensor.to_dict()}
            self._add(name, track, start, end, about)

    def span(self, name: str, tensor: SavedTensor, start_s: float, end_s: float) -> None:
        """Add a span in which the computing thread worked on a swap or waited for it."""
        self._add(name, "compute", start_s, end_s, tensor.to_dict())

    def count(self, at_s: float, *, device: int, host: int) -> None:
        """Add the numbers of bytes that the engine holds at this time."""
        entry = chrome_trace.count(1, "bytes", at_s, {"device": device, "host": host})
        with self._lock:
            self._events.append(entry)

    def _add(
        self, name: str, track: Track, start_s: float, end_s: float, about: dict[str, Any]
    ) -> None:
        entry = chrome_trace.span(1, TRACKS.index(track) + 1, name, start_s, end_s, about)
        with self._lock:
            self._events.append(entry)

    def to_chrome(self) -> dict[str, Any]:
        """The Chrome trace as plain data; time starts at 0 with the first event or the recording.

        The recording's begin and end are facts of the document, if it has ended.
        """
        with self._lock:
            events = [dict(event) for event in self._events]
        span = [1e6 * self._begin_s, 1e6 * self._end_s] if self._end_s else []
        first = min([event["ts"] for event in events] + span, default=0.0)
        for event in events:
            event["ts"] -= first
        events.sort(key=lambda event: event["ts"])
        names = [chrome_trace.lane(1, i, track) for i, track in enumerate(TRACKS, 1)]
        about: dict[str, Any] = {"format": FORMAT, "version": VERSION}
        if span:
            about["recorded_us"] = [at - first for at in span]
        return chrome_trace.document(names + events, about)

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the Chrome trace.

        Raises:
            OSError: the file cannot be written.
        """
        chrome_trace.save(self.to_chrome(), path)
