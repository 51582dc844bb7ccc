"""Part `link`: rates of the link between device and host."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import torch

from bench.gpu import samples
from bench.gpu.codecs import MIB

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.meter import Meter
    from bench.gpu.report import Report
    from cswap.experiments.timing import Timing

    Copies = dict[str, Callable[[], object]]

WAYS: Final = ("D2H", "H2D", "both")


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements, and their lengths.

    Attributes:
        sizes: bytes of a copy.
        within_s: time for one measurement.
    """

    sizes: tuple[int, ...] = tuple((64 << 10) << i for i in range(15))
    within_s: float = 0.2


FIRST: Final = Plan(sizes=tuple(MIB << i for i in range(0, 10, 2)))
"""The measurements of `Plan` that are worth most."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way across the link.

    Attributes:
        way: one of WAYS.
        nbytes: bytes that cross the link, in one direction.
        gb_per_s: bytes across the link per second, in 1e9, both directions added.
        timing: device seconds.
    """

    way: str
    nbytes: int
    gb_per_s: float
    timing: Timing


def run(meter: Meter, report: Report, plan: Plan) -> None:
    """Measure copies over sizes."""
    for nbytes in plan.sizes:
        copies = cache(partial(_copies, meter, nbytes))
        for way in WAYS:
            copy = partial(_copy, meter, way, nbytes, copies, plan.within_s)
            report.measure(f"{way} of {samples.size(nbytes)}", copy, _line)
    meter.isolate()


def _copies(meter: Meter, nbytes: int) -> Copies:
    near = [torch.zeros(nbytes, dtype=torch.uint8, device=meter.device) for _ in range(2)]
    far = [meter.pinned(nbytes) for _ in range(2)]

    def out() -> None:
        far[0].copy_(near[0], non_blocking=True)

    def back() -> None:
        near[1].copy_(far[1], non_blocking=True)

    ways = (out, back, lambda: meter.beside(out, back))
    return dict(zip(WAYS, ways, strict=True))


def _copy(
    meter: Meter, way: str, nbytes: int, copies: Callable[[], Copies], within_s: float
) -> list[Row]:
    timing = meter.time_s(copies()[way], within_s=within_s)
    moved = nbytes * (2 if way == "both" else 1)
    return [Row(way, nbytes, moved / timing.median_s / 1e9, timing)]


def _line(row: Row) -> str:
    return f"{row.gb_per_s:.1f} GB/s"
