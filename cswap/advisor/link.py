"""Measures a GPU's link, out and back, alone and both at once, and what codecs cost beside.

On a CPU there is no link. The copies of ``raw`` stand for it.
"""

from __future__ import annotations

import statistics
import threading
import time
from collections import deque
from functools import cached_property, partial
from typing import TYPE_CHECKING, Final, cast

import torch

from cswap.advisor.calibration import MOST_BYTES_PER_S, Link
from cswap.advisor.round_trip import normal, round_trip
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.advisor.calibration import CodecTimes
    from cswap.codecs.base import LateSize, Stream

LARGE: Final = 1 << 26
"""Bytes of the copies that rates are measured with."""

SMALL: Final = 1 << 16
"""Bytes of those that show the latency."""

ROUNDS: Final = 7
"""Measurements, of which the median counts."""

REPEATS: Final = 8
"""Copies per measurement of copies that run together or beside computation."""


def measure_rates() -> tuple[float, float, float]:
    """Bytes/s of a GPU's link: out, back, and each way while both are busy.

    Takes some tenths of a second, and 128 MiB of the device and of pinned memory, which torch's
    allocators keep for the next tensors.
    """
    return _rates(_Copies())


def _rates(copies: _Copies) -> tuple[float, float, float]:
    out, back = (LARGE / _median(partial(copies.seconds, LARGE, way)) for way in ("out", "back"))
    return out, back, REPEATS * LARGE / _median(copies.both_ways_s)


def measure_link() -> Link:
    """Measure a GPU's link, in some tenths of a second."""
    copies = _Copies()
    out, back, both = _rates(copies)
    small_s = _median(partial(copies.seconds, SMALL, "out"))
    compute_s = _median(copies.computation_s)
    taxed_s = _median(copies.computation_beside_codec_s)
    return Link(
        d2h_bytes_per_s=out,
        h2d_bytes_per_s=back,
        latency_s=max(0.0, small_s - SMALL / out),
        duplex_factor=min(1.0, both / out),
        codec_tax=_tax(compute_s, taxed_s),
    )


def link_of_cpu(raw: CodecTimes) -> Link:
    """The times of ``raw`` as a link: on a CPU, one thread copies, and never both ways at once."""
    compute_s, taxed_s = _median(_products_s), _median(lambda: _products_s(beside_codec=True))
    return Link(
        d2h_bytes_per_s=min(raw.encode.bytes_per_s(0.0), MOST_BYTES_PER_S),
        h2d_bytes_per_s=min(raw.decode.bytes_per_s(0.0), MOST_BYTES_PER_S),
        latency_s=(raw.encode.overhead_s + raw.decode.overhead_s) / 2,
        duplex_factor=1.0,
        codec_tax=_tax(compute_s, taxed_s),
    )


def _median(measure: Callable[[], float]) -> float:
    measure()  # touches pages, raises clocks, fills caches
    return statistics.median(measure() for _ in range(ROUNDS))


def _tax(compute_s: float, taxed_s: float) -> float:
    return min(0.95, max(0.0, 1 - compute_s / taxed_s))


def _finish(event: torch.cuda.Event, size: object) -> None:
    event.synchronize()
    if not isinstance(size, int):
        cast("LateSize", size).value()  # gives its word of pinned memory back


def _products_s(*, beside_codec: bool = False) -> float:
    # Seconds of `REPEATS` matrix products of a CPU; beside an encoder on another thread.
    zvc, x, matrix = get_codec("zvc"), normal(1 << 18).relu(), normal(384, 384)
    done = threading.Event()

    def encode() -> None:
        while beside_codec and not done.is_set():
            round_trip(zvc, x, repeat=1)

    thread = threading.Thread(target=encode)
    thread.start()
    try:
        start = time.perf_counter()
        for _ in range(REPEATS):
            matrix @ matrix
        return time.perf_counter() - start
    finally:
        done.set()
        thread.join()


class _Copies:
    """Pinned copies on streams of their own, timed by events."""

    def __init__(self) -> None:
        self._host = [torch.empty(LARGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._device = [torch.empty(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(3)]  # type: ignore[no-untyped-call]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())  # whose memory it is

    @cached_property
    def _matrix(self) -> torch.Tensor:
        return normal(4096, 4096, device="cuda")

    def seconds(self, nbytes: int, direction: str) -> float:
        """Seconds of one copy, "out" or "back"."""
        return self._timed({direction == "back": lambda: self._issue(nbytes, direction)})

    def both_ways_s(self) -> float:
        """Seconds of `REPEATS` large copies out, while copies back run."""
        return self._timed(
            {0: lambda: self._issue_many("out"), 1: lambda: self._issue_many("back")}
        )

    def computation_s(self) -> float:
        """Seconds of `REPEATS` matrix products."""
        return self._timed({2: self._multiply})

    def computation_beside_codec_s(self) -> float:
        """Seconds of `REPEATS` matrix products beside an encoder on another stream."""
        zvc, x = get_codec("zvc"), normal(1 << 24, device="cuda").relu()
        out = torch.empty(zvc.bound(x.dtype, x.numel()), dtype=torch.uint8, device="cuda")

        def encode() -> object:
            stream = cast("Stream", torch.cuda.current_stream())
            return zvc.encode_flat(x, out, key=DEFAULT_KEY, stream=stream)

        return self._timed({2: self._multiply}, beside=encode)

    def _timed(
        self, jobs: dict[int, Callable[[], object]], beside: Callable[[], object] | None = None
    ) -> float:
        # Seconds of the first job while the others run beside it, and ``beside`` again and again.
        first = next(iter(jobs))
        events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        for index in reversed(list(jobs)):  # the first job starts last
            with torch.cuda.stream(self._streams[index]):
                if index == first:
                    events[0].record()
                jobs[index]()
                if index == first:
                    events[1].record()
        if beside is not None:
            self._repeat(beside, events[1])
        torch.cuda.synchronize()
        return float(events[0].elapsed_time(events[1])) / 1e3

    def _repeat(self, encode: Callable[[], object], done: torch.cuda.Event) -> None:
        # Encode until an event has happened. Two encodes wait at a time: a stream never runs dry,
        # and no encode is left to run long after the event.
        waiting: deque[tuple[torch.cuda.Event, object]] = deque()
        while not done.query():  # type: ignore[no-untyped-call]
            with torch.cuda.stream(self._streams[0]):
                size, event = encode(), torch.cuda.Event()  # type: ignore[no-untyped-call]
                event.record()
            waiting.append((event, size))
            if len(waiting) > 2:
                _finish(*waiting.popleft())
        for event, size in waiting:
            _finish(event, size)

    def _issue(self, nbytes: int, direction: str) -> None:
        back = direction == "back"
        source, target = self._device[back], self._host[back]
        if back:
            source, target = target, source
        target[:nbytes].copy_(source[:nbytes], non_blocking=True)

    def _issue_many(self, direction: str) -> None:
        for _ in range(REPEATS):
            self._issue(LARGE, direction)

    def _multiply(self) -> None:
        for _ in range(REPEATS):
            self._matrix @ self._matrix
