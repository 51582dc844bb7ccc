"""Part `link`: rates of the link between device and host, and kernels that store across it."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch

from bench.gpu import samples
from bench.gpu.codecs import MIB
from bench.gpu.shapes import limited_blocks
from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.registry import get_codec

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.meter import Meter
    from bench.gpu.report import Report
    from bench.gpu.samples import Sample
    from cswap.codecs.base import LateSize
    from cswap.experiments.timing import Timing

    Copies = dict[str, Callable[[], object]]

WAYS: Final = ("D2H", "H2D", "both")
STORED: Final = (("zvc", samples.RELU_85), ("int8", samples.DENSE))


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements, and their lengths.

    Attributes:
        sizes: bytes of a copy.
        stored_bytes: raw bytes of tensors that kernels encode straight into host memory.
        blocks: numbers of thread blocks that do so.
        within_s: time for one measurement.
    """

    sizes: tuple[int, ...] = tuple((64 << 10) << i for i in range(15))
    stored_bytes: int = 256 * MIB
    blocks: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64, 128, 256, 528)
    within_s: float = 0.2


FIRST: Final = Plan(sizes=tuple(MIB << i for i in range(0, 10, 2)), blocks=(8, 32, 128, 528))
"""The measurements of `Plan` that are worth most."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way across the link.

    Attributes:
        way: one of WAYS, or the codec that stores its encoding in host memory.
        blocks: thread blocks of that kernel; 0 for copies.
        nbytes: bytes that cross the link, in one direction.
        raw_nbytes: their number before encoding.
        gb_per_s: bytes across the link per second, in 1e9, both directions added.
        raw_gb_per_s: raw bytes per second, in 1e9.
        timing: device seconds.
    """

    way: str
    blocks: int
    nbytes: int
    raw_nbytes: int
    gb_per_s: float
    raw_gb_per_s: float
    timing: Timing


def run(meter: Meter, report: Report, plan: Plan) -> None:
    """Measure copies over sizes, then encodes straight into pinned memory."""
    for nbytes in plan.sizes:
        copies = cache(partial(_copies, meter, nbytes))
        for way in WAYS:
            copy = partial(_copy, meter, way, nbytes, copies, plan.within_s)
            report.measure(f"{way} of {samples.size(nbytes)}", copy, _line)
    meter.isolate()
    for name, sample in STORED:
        for blocks in plan.blocks:
            what = f"{name} into pinned memory by {blocks} blocks"
            store = partial(_store, meter, name, sample, blocks, plan)
            report.measure(what, store, _line)
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
    return [_row(way, 0, nbytes, nbytes * (2 if way == "both" else 1), nbytes, timing)]


def _store(meter: Meter, name: str, sample: Sample, blocks: int, plan: Plan) -> list[Row]:
    codec = get_codec(name)
    x = sample.make(plan.stored_bytes, meter.device)
    out = meter.pinned(codec.bound(x.dtype, x.numel()))
    sizes: list[int | LateSize] = []

    def encode() -> None:
        stream: Any = meter.stream
        sizes.append(codec.encode_flat(x, out, key=DEFAULT_KEY, stream=stream))

    with limited_blocks(codec, x.dtype, meter.device, blocks):
        timing = meter.time_s(encode, within_s=plan.within_s)
    nbytes = max(s if isinstance(s, int) else s.value() for s in sizes)
    restored = torch.empty_like(x)
    codec.decode_flat(out[:nbytes].to(x.device), restored, stream=None)
    if codec.lossless and not torch.equal(restored, x):
        raise ValueError("what was stored in host memory decodes to something else")
    return [_row(name, blocks, nbytes, nbytes, x.nbytes, timing)]


def _row(way: str, blocks: int, nbytes: int, moved: int, raw_nbytes: int, timing: Timing) -> Row:
    return Row(
        way=way,
        blocks=blocks,
        nbytes=nbytes,
        raw_nbytes=raw_nbytes,
        gb_per_s=moved / timing.median_s / 1e9,
        raw_gb_per_s=raw_nbytes / timing.median_s / 1e9,
        timing=timing,
    )


def _line(row: Row) -> str:
    return f"{row.gb_per_s:.1f} GB/s, raw {row.raw_gb_per_s:.1f}"
