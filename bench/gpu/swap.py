"""Part `swap`: seconds to bring one tensor to the host and back, each way of doing so."""

from __future__ import annotations

import abc
import time
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final

from torch.autograd.graph import save_on_cpu

from bench.gpu import samples
from bench.gpu.codecs import MIB
from bench.gpu.contenders import Contender, relative_error
from cswap.codecs.registry import get_codec
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.experiments.timing import Timing, timing_of
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    import torch

    from bench.gpu.meter import Meter
    from bench.gpu.report import Report
    from bench.gpu.samples import Sample

COPY: Final = "pinned copy"
"""vDNN's way: a copy to pinned memory and back, nothing else."""

SAVE_ON_CPU: Final = "save_on_cpu"

GROUPS: Final = (
    (samples.RELU_85, ("raw", "zvc")),
    (samples.DENSE, ("raw", "int8", "fp8")),
    (samples.DENSE_HALF, ("raw", "int8", "fp8", "expk")),
)
"""Data, and the codecs that an engine swaps it with."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements, and their number.

    Attributes:
        sizes: bytes of a tensor.
        rounds: measurements of each; all ways take turns.
    """

    sizes: tuple[int, ...] = tuple(MIB << i for i in range(11))
    rounds: int = 15


FIRST: Final = Plan(sizes=(MIB, 64 * MIB, 256 * MIB))
"""The measurements of `Plan` that are worth most."""


@dataclass(frozen=True, slots=True)
class Row:
    """One way to swap one tensor.

    Attributes:
        data: kind of values.
        dtype: of the elements.
        nbytes: raw bytes.
        way: COPY, SAVE_ON_CPU or "cswap " and a codec.
        ratio: raw over encoded bytes.
        out: seconds until the tensor's memory could be used for something else and the host has it.
        back: seconds until the device has it again.
        total_s: sum of both medians.
        less_than_copy: per cent that total_s is below COPY's; the paper's "swap latency reduction".
        less_than_save_on_cpu: likewise.
        bound_s: least that this codec could take in this run, see `bound_s`; None for peers.
        of_bound: total_s over bound_s.
        host_us: microseconds of that that the calling thread was busy, of both calls.
        fallbacks: times that the engine took a slower path.
    """

    data: str
    dtype: str
    nbytes: int
    way: str
    ratio: float
    out: Timing
    back: Timing
    total_s: float
    less_than_copy: float
    less_than_save_on_cpu: float
    bound_s: float | None
    of_bound: float | None
    host_us: float
    fallbacks: int


def bound_s(copy: tuple[float, float], codec: tuple[float, float], ratio: float) -> float:
    """Least seconds out and back: per direction max(N / (r B), N / C), whichever is slower.

    Args:
        copy: N / B: seconds of a raw copy to the host, and of one back.
        codec: N / C: seconds of an encode, and of a decode.
        ratio: r, raw over encoded bytes.

    >>> bound_s((10.0, 20.0), (1.0, 6.0), 4.0)
    8.5
    """
    return sum(max(c / ratio, k) for c, k in zip(copy, codec, strict=True))


def less_percent(mine_s: float, theirs_s: float) -> float:
    """How many per cent less time mine takes; negative if it takes more.

    >>> less_percent(1.0, 4.0), less_percent(6.0, 4.0)
    (75.0, -50.0)
    """
    return 100.0 * (1.0 - mine_s / theirs_s)


class Way(abc.ABC):
    """One way to swap a tensor out and in."""

    lossless = True
    ratio = 1.0
    fallbacks = 0

    @abc.abstractmethod
    def out(self, x: torch.Tensor) -> Any:
        """Begin to swap out; return the argument of `back`."""

    @abc.abstractmethod
    def settle(self) -> None:
        """Wait until that is done."""

    @abc.abstractmethod
    def back(self, token: Any) -> torch.Tensor:
        """Begin to swap in."""


class Copy(Way):
    """Into pinned memory that is there already, and back."""

    def __init__(self, x: torch.Tensor, meter: Meter) -> None:
        """Args: x: the tensor; meter: of its device."""
        self._host = meter.pinned(x.nbytes).view(x.dtype)
        self._meter = meter

    def out(self, x: torch.Tensor) -> torch.device:
        """See `Way.out`."""
        self._host.copy_(x, non_blocking=True)
        return x.device

    def settle(self) -> None:
        """See `Way.settle`."""
        self._meter.synchronize()

    def back(self, token: torch.device) -> torch.Tensor:
        """See `Way.back`."""
        return self._host.to(token, non_blocking=True)


class SaveOnCpu(Way):
    """torch's own hooks."""

    def __init__(self, meter: Meter) -> None:
        """Args: meter: of the tensors' device."""
        self._meter = meter
        self._hooks: Any = save_on_cpu(pin_memory=meter.pins)

    def out(self, x: torch.Tensor) -> Any:
        """See `Way.out`."""
        return self._hooks.pack_hook(x)

    def settle(self) -> None:
        """See `Way.settle`."""
        self._meter.synchronize()

    def back(self, token: Any) -> torch.Tensor:
        """See `Way.back`."""
        found: torch.Tensor = self._hooks.unpack_hook(token)
        return found


class Swap(Way):
    """An engine of cswap's with one codec."""

    def __init__(self, codec_name: str) -> None:
        """Args: codec_name: of the codec that is to be used."""
        self.lossless = get_codec(codec_name).lossless
        self._engine = SwapEngine(SwapConfig(codec=codec_name, min_bytes=0))
        self._name = codec_name

    def out(self, x: torch.Tensor) -> Any:
        """See `Way.out`."""
        return self._engine.pack(x)

    def settle(self) -> None:
        """See `Way.settle`."""
        self._engine.synchronize()

    def back(self, token: Any) -> torch.Tensor:
        """See `Way.back`."""
        return self._engine.unpack(token)

    def check(self) -> None:
        """Take the figures down that the engine knows.

        Raises:
            ValueError: the tensor was not swapped by the codec asked for.
        """
        stats = self._engine.stats
        if list(stats.by_codec) != [self._name]:
            raise ValueError(
                f"not swapped by {self._name}: {stats.by_codec}, {stats.kept_by_reason}"
            )
        self.ratio, self.fallbacks = stats.ratio, stats.fallbacks


@dataclass(slots=True)
class Seconds:
    """Of all rounds of one way: out, back, and of both the time of the calling thread."""

    out: list[float]
    back: list[float]
    host: list[float]


def run(meter: Meter, report: Report, plan: Plan) -> None:
    """Measure every group at every size. A group is one measurement: its ways take turns."""
    for nbytes in plan.sizes:
        for sample, codecs in GROUPS:
            name = f"{samples.size(nbytes)} of {sample}"
            if not report.missing([name]):
                continue
            group = partial(_group, sample, nbytes, codecs, meter, report, plan.rounds)
            report.measure(name, group, lambda row: f"{row.way}, {_line(row)}")
            meter.isolate()


def _group(
    sample: Sample,
    nbytes: int,
    codecs: tuple[str, ...],
    meter: Meter,
    report: Report,
    rounds: int,
) -> list[Row]:
    x = sample.make(nbytes, meter.device)
    ways: dict[str, Way] = {COPY: Copy(x, meter), SAVE_ON_CPU: SaveOnCpu(meter)}
    for codec in codecs:
        swap = Swap(codec)
        try:
            _check(swap, x, meter)
        except Exception as error:  # the codec may not be able to take it; the others do
            report.skip(f"{codec} on {samples.size(nbytes)} of {sample}", error)
            continue
        ways[f"cswap {codec}"] = swap
    seconds = {name: Seconds([], [], []) for name in ways}
    for name in (COPY, SAVE_ON_CPU):
        _swap(ways[name], x, meter, seconds[name])  # pins its memory: not counted
        seconds[name] = Seconds([], [], [])
    for _ in range(rounds):
        for name, way in ways.items():
            _swap(way, x, meter, seconds[name])
    medians = {
        name: timing_of(s.out).median_s + timing_of(s.back).median_s for name, s in seconds.items()
    }
    copy = timing_of(seconds[COPY].out).median_s, timing_of(seconds[COPY].back).median_s
    return [
        _row(sample, x, name, way, seconds[name], medians, copy, meter)
        for name, way in ways.items()
    ]


def _check(way: Swap, x: torch.Tensor, meter: Meter) -> None:
    # Also compiles kernels and pins memory; twice, as the first order of tensors is learned.
    for _ in range(2):
        back = _swap(way, x, meter, Seconds([], [], []))
        relative_error(x, back, lossless=way.lossless)
    way.check()


def _swap(way: Way, x: torch.Tensor, meter: Meter, seconds: Seconds) -> torch.Tensor:
    meter.flush()
    meter.synchronize()
    start = time.perf_counter()
    token = way.out(x)
    called = time.perf_counter()
    way.settle()
    done = time.perf_counter()
    seconds.out.append(done - start)
    meter.flush()
    meter.synchronize()
    again = time.perf_counter()
    back = way.back(token)
    called_again = time.perf_counter()
    meter.synchronize()
    seconds.back.append(time.perf_counter() - again)
    seconds.host.append(called - start + called_again - again)
    return back


def _row(
    sample: Sample,
    x: torch.Tensor,
    name: str,
    way: Way,
    seconds: Seconds,
    medians: dict[str, float],
    copy: tuple[float, float],
    meter: Meter,
) -> Row:
    least = None
    if isinstance(way, Swap):
        way.check()
        least = _bound(name.removeprefix("cswap "), x, copy, way.ratio, meter)
    return Row(
        data=sample.kind,
        dtype=dtype_name(sample.dtype),
        nbytes=x.nbytes,
        way=name,
        ratio=way.ratio,
        out=timing_of(seconds.out),
        back=timing_of(seconds.back),
        total_s=medians[name],
        less_than_copy=less_percent(medians[name], medians[COPY]),
        less_than_save_on_cpu=less_percent(medians[name], medians[SAVE_ON_CPU]),
        bound_s=least,
        of_bound=medians[name] / least if least else None,
        host_us=1e6 * timing_of(seconds.host).median_s,
        fallbacks=way.fallbacks,
    )


def _bound(
    codec: str, x: torch.Tensor, copy: tuple[float, float], ratio: float, meter: Meter
) -> float:
    if get_codec(codec).verbatim:
        return sum(copy)
    contender = Contender(get_codec(codec), x, meter)
    encode = meter.time_s(contender.encode, within_s=0.05).median_s
    contender.settle()
    decode = meter.time_s(contender.decode, within_s=0.05).median_s
    return bound_s(copy, (encode, decode), ratio)


def _line(row: Row) -> str:
    text = (
        f"out {1e3 * row.out.median_s:.3f} ms, back {1e3 * row.back.median_s:.3f} ms, "
        f"{row.less_than_copy:+.0f} % less than a pinned copy, "
        f"{row.less_than_save_on_cpu:+.0f} % less than save_on_cpu, host {row.host_us:.0f} us"
    )
    return text if row.of_bound is None else f"{text}, {row.of_bound:.2f} of the bound"
