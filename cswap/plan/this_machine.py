"""A hardware profile of this machine, from its calibration and a timed matrix product."""

from __future__ import annotations

import os
import statistics
import time
from typing import TYPE_CHECKING, Final

import torch

from cswap.advisor.calibration import stored
from cswap.advisor.round_trip import normal
from cswap.codecs.traits import CodecRate
from cswap.errors import HardwareError
from cswap.plan.hardware import Flops, Hardware

if TYPE_CHECKING:
    from cswap.advisor.calibration import Calibration, CodecTimes

SIDE: Final = {"cpu": 768, "cuda": 8192}
"""Side of the square matrices that are multiplied, by kind of device."""

ROUNDS: Final = 7

CODEC_TAX: Final = {"cpu": 0.95, "cuda": 0.9}
"""Share of its speed that computation loses while a codec runs, by kind of device."""

ZEROS: Final = 0.5
"""Share of zeros at which a codec's rate is read: a hardware profile has one rate per codec."""


def this_machine(kind: str = "cpu") -> Hardware:
    """A profile of this machine's device of that kind.

    Raises:
        HardwareError: the device has not been calibrated. Run `cswap calibrate`.
    """
    found = stored(kind)
    if found is None or found.link is None:
        raise HardwareError(
            f"hardware='here': this machine's {kind} has not been calibrated. Run `cswap calibrate "
            f"--device {kind}` first."
        )
    flops = {"float32": _flops(kind, torch.float32)}
    if kind == "cuda":
        flops |= {"bfloat16": _flops(kind, torch.bfloat16), "float16": _flops(kind, torch.float16)}
    link = found.link
    return Hardware(
        name=f"here ({kind})",
        memory_bytes=_memory_bytes(kind),
        flops=flops,
        memory_bytes_per_s=_memory_bytes_per_s(found, kind),
        d2h_bytes_per_s=link.d2h_bytes_per_s,
        h2d_bytes_per_s=link.h2d_bytes_per_s,
        duplex_factor=link.duplex_factor,
        link_latency_s=link.latency_s,
        host_memory_bytes=0,
        codec_tax=CODEC_TAX[kind],
        unified=kind == "cpu",
        codecs={name: _rate(times) for name, times in found.times.items() if name != "raw"},
        measured=True,
        sources={
            "": "measured on this machine by `cswap calibrate` and a matrix product",
            "codec_tax": "assumed: a CPU's codecs run in the thread that computes, and a GPU's "
            "leave a tenth of it",
        },
    )


def _rate(times: CodecTimes) -> CodecRate:
    overhead_s = max(times.encode.overhead_s, times.decode.overhead_s)
    return CodecRate(
        min(times.encode.bytes_per_s(ZEROS), 1e15),
        min(times.decode.bytes_per_s(ZEROS), 1e15),
        overhead_s,
    )


def _flops(kind: str, dtype: torch.dtype) -> Flops:
    n = SIDE[kind]
    a = normal(n, n, device=kind).to(dtype)
    took = []
    for _ in range(ROUNDS):
        start = _now(kind)
        a @ a
        took.append(_now(kind) - start)
    rate = 2 * n**3 / statistics.median(took)
    return Flops(peak=2 * n**3 / min(took), achievable=rate)


def _memory_bytes_per_s(found: Calibration, kind: str) -> float:
    if kind == "cpu":
        assert found.link is not None
        return 2 * found.link.d2h_bytes_per_s  # a copy reads and writes
    x = torch.empty(1 << 28, dtype=torch.uint8, device=kind)
    y = torch.empty_like(x)
    start = _now(kind)
    for _ in range(ROUNDS):
        y.copy_(x)
    return 2 * ROUNDS * x.nbytes / (_now(kind) - start)


def _memory_bytes(kind: str) -> int:
    if kind == "cuda":
        return int(torch.cuda.get_device_properties(0).total_memory)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))


def _now(kind: str) -> float:
    if kind == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()
