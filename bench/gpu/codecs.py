"""Part `codecs`: rate, ratio and launch time of every codec on the device, against a plain copy."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import torch

from bench.gpu import samples
from bench.gpu.contenders import Contender
from cswap.codecs.nvcomp_library import missing as missing_nvcomp
from cswap.codecs.registry import get_codec, list_codecs
from cswap.errors import CswapError
from cswap.schema.tensor import dtype_name

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.meter import Meter
    from bench.gpu.report import Report
    from bench.gpu.samples import Sample
    from cswap.codecs.base import Codec
    from cswap.experiments.timing import Timing

MIB: Final = 1 << 20
COPY: Final = "copy"
SWEPT: Final = (
    ("zvc", samples.RELU_85),
    ("int8", samples.DENSE),
    ("fp8", samples.DENSE),
    ("expk", samples.DENSE_HALF),
)
"""Measured first, and over sizes, too."""


@dataclass(frozen=True, slots=True)
class Plan:
    """The measurements, and their lengths.

    Attributes:
        sets: data sets for every codec that takes them.
        nbytes: of each.
        sweep: sizes in bytes for SWEPT.
        within_s: time for one measurement.
    """

    sets: tuple[Sample, ...] = samples.ALL
    nbytes: int = 256 * MIB
    sweep: tuple[int, ...] = tuple(MIB << i for i in range(11))
    within_s: float = 0.5


FIRST: Final = Plan(sets=(), sweep=(256 * MIB,))
"""The measurements of `Plan` that are worth most."""


@dataclass(frozen=True, slots=True)
class Row:
    """One codec on one data set.

    Attributes:
        data: kind of values.
        dtype: of the elements.
        nbytes: raw bytes.
        codec: its name, or "copy": device to device, to which the shares refer.
        lossless: whether every bit comes back.
        ratio: raw over encoded bytes.
        encode_gb_per_s: raw bytes per second, in 1e9, by the median.
        decode_gb_per_s: likewise.
        encode_of_copy: the copy's time over the encode's.
        decode_of_copy: likewise.
        encode: device seconds.
        decode: device seconds.
        encode_launch_us: host microseconds of a call.
        decode_launch_us: likewise.
        first_call_s: of encode and decode; holds compiling or loading kernels.
        relative_rms_error: of the decoded tensor; 0 if lossless.
    """

    data: str
    dtype: str
    nbytes: int
    codec: str
    lossless: bool
    ratio: float
    encode_gb_per_s: float
    decode_gb_per_s: float
    encode_of_copy: float
    decode_of_copy: float
    encode: Timing
    decode: Timing
    encode_launch_us: float
    decode_launch_us: float
    first_call_s: float
    relative_rms_error: float


def usable(device: torch.device, dtype: torch.dtype) -> list[Codec]:
    """Codecs that take this dtype on this device."""
    found = []
    for name in list_codecs():
        try:
            codec = get_codec(name)
        except CswapError:  # its package is not installed: `cswap codecs` says which
            continue
        if codec.supports(dtype, device.type):
            found.append(codec)
    return found


def run(meter: Meter, report: Report, plan: Plan) -> None:
    """Measure some codecs over sizes, then every codec on every data set."""
    if why := missing_nvcomp():
        report.refuse("nvCOMP", why)
    for name, sample in SWEPT:
        for nbytes in plan.sweep:
            _measure_all([name], sample, nbytes, meter, report, plan)
    for sample in plan.sets:
        codecs = [codec.name for codec in usable(meter.device, sample.dtype)]
        _measure_all(codecs, sample, plan.nbytes, meter, report, plan)


def _measure_all(
    names: list[str],
    sample: Sample,
    nbytes: int,
    meter: Meter,
    report: Report,
    plan: Plan,
) -> None:
    data = f"{samples.size(nbytes)} of {sample}"
    # In every run: a share of the copy's rate holds for rates of one run.
    start = cache(partial(_start, sample, nbytes, meter, plan.within_s))
    wanted = {f"{name} on {data}": name for name in names}
    if report.missing(wanted):
        report.measure(f"copy of {data}", lambda: [start().copy], _line)
    for what, name in wanted.items():
        make = partial(_measure, name, start, meter, plan.within_s)
        report.measure(what, make, _line)
    start.cache_clear()
    meter.isolate()


@dataclass(frozen=True, slots=True)
class Start:
    """A data set on the device.

    Attributes:
        sample: kind of values.
        x: its elements.
        copy: how fast a plain copy of it is.
    """

    sample: Sample
    x: torch.Tensor
    copy: Row


def _start(sample: Sample, nbytes: int, meter: Meter, within_s: float) -> Start:
    x = sample.make(nbytes, meter.device)
    return Start(sample, x, _copy(sample, x, meter, within_s))


def _copy(sample: Sample, x: torch.Tensor, meter: Meter, within_s: float) -> Row:
    target = torch.empty_like(x)

    def copy() -> None:
        target.copy_(x)

    timing, launch_us = meter.time_s(copy, within_s=within_s), meter.launch_us(copy)
    return _row(sample, x, COPY, timing, timing, timing, (launch_us, launch_us))


def _measure(
    name: str,
    start: Callable[[], Start],
    meter: Meter,
    within_s: float,
) -> list[Row]:
    x = start().x
    contender = Contender(get_codec(name), x, meter)
    encode = meter.time_s(contender.encode, within_s=within_s)
    contender.settle()
    decode = meter.time_s(contender.decode, within_s=within_s)
    launch_us = meter.launch_us(contender.encode), meter.launch_us(contender.decode)
    contender.settle()
    copy = start().copy.encode
    return [_row(start().sample, x, name, encode, decode, copy, launch_us, contender)]


def _row(
    sample: Sample,
    x: torch.Tensor,
    name: str,
    encode: Timing,
    decode: Timing,
    copy: Timing,
    launch_us: tuple[float, float],
    contender: Contender | None = None,
) -> Row:
    return Row(
        data=sample.kind,
        dtype=dtype_name(sample.dtype),
        nbytes=x.nbytes,
        codec=name,
        lossless=contender is None or contender.lossless,
        ratio=1.0 if contender is None else x.nbytes / contender.nbytes,
        encode_gb_per_s=x.nbytes / encode.median_s / 1e9,
        decode_gb_per_s=x.nbytes / decode.median_s / 1e9,
        encode_of_copy=copy.median_s / encode.median_s,
        decode_of_copy=copy.median_s / decode.median_s,
        encode=encode,
        decode=decode,
        encode_launch_us=launch_us[0],
        decode_launch_us=launch_us[1],
        first_call_s=0.0 if contender is None else contender.first_call_s,
        relative_rms_error=0.0 if contender is None else contender.error,
    )


def _line(row: Row) -> str:
    return (
        f"ratio {row.ratio:.2f}, encode {row.encode_gb_per_s:.0f} GB/s "
        f"({row.encode_of_copy:.2f} of a copy), decode {row.decode_gb_per_s:.0f} "
        f"({row.decode_of_copy:.2f}), launch {row.encode_launch_us:.0f} + "
        f"{row.decode_launch_us:.0f} us, first call {row.first_call_s:.1f} s"
    )
