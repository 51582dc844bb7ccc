"""Measures a GPU's link: out and back, alone and both at once.

A CPU has none. The times of ``raw`` stand for it.
"""

from __future__ import annotations

import statistics
from functools import partial
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor.calibration import MOST_BYTES_PER_S, Link

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.advisor.calibration import CodecTimes

LARGE: Final = 1 << 26
"""Bytes of the copies that rates are measured with."""

SMALL: Final = 1 << 16
"""Bytes of those that show the latency."""

ROUNDS: Final = 7
"""Measurements, of which the median counts."""

REPEATS: Final = 8
"""Copies per measurement of copies in both directions."""


def measure_rates() -> tuple[float, float, float]:
    """Bytes/s of a GPU's link: out, back, and each way while both are busy.

    Takes some tenths of a second, and 128 MiB of the device and of pinned memory, which torch's
    allocators keep for the next tensors.
    """
    return _rates(_Copies())


def measure_link() -> Link:
    """Measure a GPU's link, likewise."""
    copies = _Copies()
    out, back, both = _rates(copies)
    small_s = _median(partial(copies.seconds, SMALL, "out"))
    return Link(
        d2h_bytes_per_s=out,
        h2d_bytes_per_s=back,
        latency_s=max(0.0, small_s - SMALL / out),
        duplex_factor=min(1.0, both / out),
    )


def link_of_cpu(raw: CodecTimes) -> Link:
    """The times of ``raw`` as a link: on a CPU, one thread copies, and never both ways at once."""
    return Link(
        d2h_bytes_per_s=min(raw.encode.bytes_per_s(0.0), MOST_BYTES_PER_S),
        h2d_bytes_per_s=min(raw.decode.bytes_per_s(0.0), MOST_BYTES_PER_S),
        latency_s=(raw.encode.overhead_s + raw.decode.overhead_s) / 2,
        duplex_factor=1.0,
    )


def _rates(copies: _Copies) -> tuple[float, float, float]:
    out, back = (LARGE / _median(partial(copies.seconds, LARGE, way)) for way in ("out", "back"))
    return out, back, REPEATS * LARGE / _median(copies.both_ways_s)


def _median(measure: Callable[[], float]) -> float:
    measure()  # touches pages, raises clocks, fills caches
    return statistics.median(measure() for _ in range(ROUNDS))


class _Copies:
    """Pinned copies on streams of their own, timed by events."""

    def __init__(self) -> None:
        self._host = [torch.empty(LARGE, dtype=torch.uint8, pin_memory=True) for _ in range(2)]
        self._device = [torch.empty(LARGE, dtype=torch.uint8, device="cuda") for _ in range(2)]
        self._streams = [torch.cuda.Stream() for _ in range(2)]  # type: ignore[no-untyped-call]
        for stream in self._streams:
            stream.wait_stream(torch.cuda.current_stream())  # whose memory it is

    def seconds(self, nbytes: int, direction: str) -> float:
        """Seconds of one copy, "out" or "back"."""
        return self._timed(lambda: self._issue(nbytes, direction))

    def both_ways_s(self) -> float:
        """Seconds of `REPEATS` large copies out, while copies back run."""
        return self._timed(lambda: self._issue_many("out"), lambda: self._issue_many("back"))

    def _timed(
        self, job: Callable[[], object], beside: Callable[[], object] | None = None
    ) -> float:
        # Seconds of a job while the other one, which starts first, runs beside it.
        first, last = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        torch.cuda.synchronize()
        if beside is not None:
            with torch.cuda.stream(self._streams[1]):
                beside()
        with torch.cuda.stream(self._streams[0]):
            first.record()
            job()
            last.record()
        torch.cuda.synchronize()
        return float(first.elapsed_time(last)) / 1e3

    def _issue(self, nbytes: int, direction: str) -> None:
        back = direction == "back"
        source, target = self._device[back], self._host[back]
        if back:
            source, target = target, source
        target[:nbytes].copy_(source[:nbytes], non_blocking=True)

    def _issue_many(self, direction: str) -> None:
        for _ in range(REPEATS):
            self._issue(LARGE, direction)
