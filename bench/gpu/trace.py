"""Part `trace`: a step's time on host and device by operator, as torch's profiler sees it.

The costs of the twin (`bench/twin/profiles.py`) are corrected by these rows. The profiler takes
some time of the host for each operator, so its sums are above those of a step.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Final

from torch.profiler import ProfilerActivity, profile

from bench.gpu import training
from bench.workloads.methods import METHODS, ORACLE, Method

if TYPE_CHECKING:
    from bench.gpu.meter import Meter
    from bench.gpu.report import Report

MOST_ROWS: Final = 80
"""Operators and kernels of a step, those that take the most time first."""

WAYS: Final = tuple(
    method for method in METHODS if method.name in (ORACLE, "cswap raw", "cswap lossless")
)

WHOLE: Final = "step"
"""Name of the row of the whole step."""


@dataclass(frozen=True, slots=True)
class Row:
    """An operator, a function of CUDA or a kernel, in one step.

    Attributes:
        model: the task's name.
        method: the method's.
        batch: inputs per step.
        name: of the operator; `WHOLE`: all of them.
        count: calls.
        host_us: microseconds of the host, without those of operators inside of it.
        device_us: likewise of the device.
    """

    model: str
    method: str
    batch: int
    name: str
    count: int
    host_us: float
    device_us: float


def run(
    meter: Meter,
    report: Report,
    task: training.Task = training.SMALL,
    methods: tuple[Method, ...] = WAYS,
) -> None:
    """Profile one step of a model, in each way to train it."""
    for method in methods:
        report.measure(f"{task.name}, {method.name}", partial(_rows, task, method, meter), _line)


def _rows(task: training.Task, method: Method, meter: Meter) -> list[Row]:
    batch = training.fitting_batch(task, meter)
    if not batch:
        raise RuntimeError(f"no batch of {task.batch} or less can be trained")
    task = replace(task, batch=batch)
    activities = [ProfilerActivity.CPU]
    if meter.device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    meter.isolate()
    run = training.Run(task, method, meter)
    try:
        for _ in range(training.n_warm(method)):
            run.step()
        with profile(activities=activities) as profiler:
            seconds, _ = run.step()
    finally:
        run.close()
    row = partial(Row, task.name, method.name, batch)
    events = [
        row(str(e.key), int(e.count), float(e.self_cpu_time_total), float(e.self_device_time_total))
        for e in profiler.key_averages()
    ]
    events.sort(key=lambda e: -max(e.host_us, e.device_us))
    device_us = sum(e.device_us for e in events)
    return [row(WHOLE, 1, 1e6 * seconds, device_us), *events[:MOST_ROWS]]


def _line(row: Row) -> str:
    return f"{row.name}: {row.count} x, host {row.host_us:.0f} us, device {row.device_us:.0f} us"
