"""Part `training`: memory and time of a training step, by method."""

from __future__ import annotations

import time
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.gpu.meter import rss_bytes
from bench.workloads import large_models as models
from bench.workloads.host_memory import host_available_bytes
from bench.workloads.methods import METHODS, ORACLE, Method
from cswap.experiments.timing import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Callable

    from bench.gpu.meter import Meter
    from bench.gpu.report import Report

GIB: Final = 1 << 30
N_WARM: Final = 3
"""Steps before the timed ones: kernels compile, memory is pinned, orders of tensors are learned."""

N_WARM_FIT: Final = 40
"""The same with a goal, as without options: it explores, plans, and settles."""

HOST_SHARE: Final = 0.25
"""Share of the host memory that a batch's saved tensors may need: rounded up to powers of 2,
pinned copies take up to twice their size.
"""


OUT_OF_MEMORY: Final = ("out of memory", "not enough memory")
"""Parts of torch's messages, of devices and of the host. An illegal access names memory, too."""


@dataclass(frozen=True, slots=True)
class Task:
    """One model to train.

    Attributes:
        name: for tables.
        build: makes the model, on the current default device.
        batch: inputs per step where they fit.
        input_sizes: of one input.
        n_classes: of the targets; inputs are below it, too, where they are tokens.
        tokens: whether inputs are int64 tokens, each with a target, or images with one each.
        weights: dtype of the parameters.
        autocast: dtype of autocast, or None.
        adamw: whether the optimizer is AdamW in any case; else it is for tokens, see `optimizer`.
    """

    name: str
    build: Callable[[], models.BlockModel]
    batch: int
    input_sizes: tuple[int, ...] = (3, 224, 224)
    n_classes: int = 1000
    tokens: bool = False
    weights: torch.dtype = torch.float32
    autocast: torch.dtype | None = None
    adamw: bool = False

    @property
    def target_sizes(self) -> tuple[int, ...]:
        """Sizes of a batch's targets."""
        return (self.batch, *self.input_sizes) if self.tokens else (self.batch,)

    def loss(self, logits: Tensor, targets: Tensor) -> Tensor:
        """Of the model's output."""
        if self.tokens:
            # With the classes last: the kernels for [batch, classes, time] are many times slower.
            logits, targets = logits.transpose(1, 2).flatten(0, 1), targets.flatten()
        return functional.cross_entropy(logits, targets)

    def inputs(self, device: torch.device) -> tuple[Tensor, Tensor]:
        """The same batch every time."""
        generator = torch.Generator(device).manual_seed(0)
        sizes = (self.batch, *self.input_sizes)
        make = partial(torch.randint, self.n_classes, generator=generator, device=device)
        if self.tokens:
            return make(sizes), make(self.target_sizes)
        images = torch.randn(sizes, generator=generator, device=device, dtype=self.weights)
        return images, make(self.target_sizes)

    def optimizer(self, model: nn.Module) -> torch.optim.Optimizer:
        """AdamW for language models, SGD with momentum for images."""
        if self.tokens or self.adamw:
            return torch.optim.AdamW(model.parameters(), lr=1e-4)
        return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def gpt2(name: str, sizes: tuple[int, int, int], batch: int, **options: Any) -> Task:
    """A GPT-2. Args: name: for tables; sizes: see `models.GPT2_SMALL`; options: more of `Task`."""
    build = partial(models.gpt2, *sizes)
    return Task(name, build, batch, (models.CONTEXT,), models.VOCABULARY, tokens=True, **options)


VGG: Final = Task("VGG-16", models.vgg16, 128)
RESNET: Final = Task("ResNet-50", models.resnet50, 256)
SMALL: Final = gpt2("GPT-2 small", models.GPT2_SMALL, 16, autocast=torch.bfloat16)
MEDIUM: Final = gpt2("GPT-2 medium", models.GPT2_MEDIUM, 16, autocast=torch.bfloat16)
LARGE: Final = gpt2("GPT-2 large", models.GPT2_LARGE, 8, autocast=torch.bfloat16)
_XL: Final = gpt2("GPT 1.3B", models.GPT_1_3B, 8, weights=torch.bfloat16)


CHECKPOINT: Final = "checkpoint"

FIT: Final = Method("cswap fit", options={})
"""A goal of the peak that checkpointing has, from an earlier row."""

WHOLE_DEVICE: Final = Method("cswap fit, device", options={"fit": "device"})
"""A goal of the device's own memory: where all fits, nothing is to move."""

ALL: Final = (*METHODS, FIT, WHOLE_DEVICE)


@dataclass(frozen=True, slots=True)
class Plan:
    """The training, and its length.

    Attributes:
        tasks: models.
        methods: ways to train them.
        n_steps: timed steps.
    """

    tasks: tuple[Task, ...] = (VGG, RESNET, SMALL, MEDIUM, LARGE, _XL)
    methods: tuple[Method, ...] = ALL
    n_steps: int = 10


_FEW: Final = (ORACLE, CHECKPOINT, "cswap lossless", "cswap int8", FIT.name, WHOLE_DEVICE.name)
_FIRST_METHODS: Final = (*_FEW, "save_on_cpu", "TRL OffloadActivations", "cswap raw")


def _named(names: tuple[str, ...]) -> tuple[Method, ...]:
    return tuple(method for method in ALL if method.name in names)


FIRST: Final = (Plan((SMALL,), _named(_FIRST_METHODS)), Plan((RESNET,), _named(_FEW)))
"""The measurements of `Plan` that are worth most. Peers pin the raw bytes in the first step, at
less than 1 GiB/s: ResNet-50 would take minutes of them."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model trained in one way.

    Attributes:
        model: the task's name.
        method: the method's.
        batch: inputs per step.
        n_parameters: of the model.
        peak_allocated_bytes: most that tensors on the device took at any time of all steps.
        peak_reserved_bytes: most that torch's allocator took of the device.
        step_ms: median of a step (forward, loss, backward, optimizer).
        step: seconds of a step.
        host_rss_bytes: most of the process's resident memory, seen between forward and backward.
        host_rss_growth_bytes: the same above its value before the model was made.
        host_pinned_bytes: most of page-locked memory, as torch rounds it; None if it does not say.
        time_of_oracle: step_ms over that without swapping; None if that was not measured.
        loss: after the last step; the same for lossless methods but for atomic additions.
        cswap: the engine's statistics, where there is one.
        failure: why there are no figures, or None.
    """

    model: str
    method: str
    batch: int
    n_parameters: int
    peak_allocated_bytes: int | None = None
    peak_reserved_bytes: int | None = None
    step_ms: float | None = None
    step: Timing | None = None
    host_rss_bytes: int | None = None
    host_rss_growth_bytes: int | None = None
    host_pinned_bytes: int | None = None
    time_of_oracle: float | None = None
    loss: float | None = None
    cswap: dict[str, Any] | None = None
    failure: str | None = None


def run(meter: Meter, report: Report, plan: Plan) -> None:
    """Train every model in every way."""
    for task in plan.tasks:
        fitting = cache(partial(_fitting, task, meter, report, plan.n_steps))
        for method in plan.methods:
            make = partial(_rows, fitting, method, meter, plan.n_steps, report)
            report.measure(f"{task.name}, {method.name}", make, _line)


def _rows(
    fitting: Callable[[], tuple[Task, Row]],
    method: Method,
    meter: Meter,
    n_steps: int,
    report: Report,
) -> list[Row]:
    task, oracle = fitting()
    if method.name == ORACLE:
        return [oracle]
    if method.name == FIT.name:
        method = _within_checkpoints_peak(report, task)
    return [train(task, method, meter, n_steps, oracle.step_ms, n_warm=n_warm(method))]


def n_warm(method: Method) -> int:
    """Steps before those that count."""
    options = method.options
    return N_WARM_FIT if options is not None and (not options or "fit" in options) else N_WARM


def _within_checkpoints_peak(report: Report, task: Task) -> Method:
    for row in report.document["rows"]:
        if (row["model"], row["method"], row["batch"]) == (task.name, CHECKPOINT, task.batch):
            peak = row["peak_allocated_bytes"]
            if peak:
                return replace(FIT, options={"fit": peak})
    raise RuntimeError(f"{CHECKPOINT!r} has no peak to hold")


def _fitting(task: Task, meter: Meter, report: Report, n_steps: int) -> tuple[Task, Row]:
    """The task with a batch that fits, and its oracle.

    Every run has its own oracle, because a share of its time holds for times of one run.
    """
    batch = report.fact(f"{task.name}, batch", partial(fitting_batch, task, meter))
    if not batch:
        raise RuntimeError(f"no batch of {task.batch} or less can be trained")
    task = replace(task, batch=batch)
    return task, train(task, METHODS[0], meter, n_steps, None)


def fitting_batch(task: Task, meter: Meter) -> int:
    """The task's batch, halved until a step fits the device's and the host's memory; 0 if none."""
    while task.batch:
        row = train(task, METHODS[0], meter, 1, None)
        available = host_available_bytes()
        fits_host = available is None or (row.peak_allocated_bytes or 0) < HOST_SHARE * available
        if row.failure is None and fits_host:
            return task.batch
        why = row.failure or f"{(available or 0) / GIB:.0f} GiB of host memory are available"
        print(f"{task.name} with a batch of {task.batch}: {why}", flush=True)
        if row.failure and not any(text in row.failure.lower() for text in OUT_OF_MEMORY):
            raise RuntimeError(row.failure)  # not remembered: a smaller batch would not help
        task = replace(task, batch=task.batch // 2)
    return 0


def train(
    task: Task,
    method: Method,
    meter: Meter,
    n_steps: int,
    oracle_ms: float | None,
    *,
    n_warm: int = N_WARM,
) -> Row:
    """Train a few steps; a failure becomes a row without figures."""
    meter.isolate()
    rss_before = rss_bytes()
    with torch.device("meta"):
        n_parameters = models.count_parameters(task.build())
    row = Row(task.name, method.name, task.batch, n_parameters)
    try:
        row = _train(task, method, meter, (n_warm, n_steps), row, rss_before)
    except Exception as error:  # out of memory, most of all: the other methods may do better
        text = (str(error).splitlines() or [""])[0]
        return replace(row, failure=f"{type(error).__name__}: {text}"[:300])
    if oracle_ms and row.step_ms:
        return replace(row, time_of_oracle=row.step_ms / oracle_ms)
    return row if method.name != ORACLE else replace(row, time_of_oracle=1.0)


def _train(
    task: Task, method: Method, meter: Meter, n_steps: tuple[int, int], row: Row, rss_before: int
) -> Row:
    # n_steps: before the timed ones, and timed.
    run = Run(task, method, meter)
    seconds, rss, allocated = [], [], []
    try:
        for _ in range(sum(n_steps)):
            step_s, rss_after_forward = run.step()
            seconds.append(step_s)
            rss.append(rss_after_forward)
            allocated.append(meter.memory().allocated)  # a goal begins the peak anew in each step
    finally:
        run.close()
    step, memory = timing_of(seconds[n_steps[0] :]), meter.memory()
    return replace(
        row,
        peak_allocated_bytes=max(allocated),
        peak_reserved_bytes=memory.reserved,
        step_ms=1e3 * step.median_s,
        step=step,
        host_rss_bytes=max(rss),
        host_rss_growth_bytes=max(rss) - rss_before,
        host_pinned_bytes=memory.pinned,
        loss=float(run.loss),
        cswap=None if run.handle is None else run.handle.stats.to_dict(),
    )


class Run:
    """A model in training, in one way.

    Attributes:
        handle: of cswap; None: it is not installed.
        loss: of the last step.
    """

    def __init__(self, task: Task, method: Method, meter: Meter) -> None:
        """Args: task, method: what is trained, and how; meter: of the device."""
        torch.manual_seed(0)
        with meter.device:
            self._model = task.build().to(task.weights)
        self._task, self._method, self._meter = task, method, meter
        self._inputs, self._targets = task.inputs(meter.device)
        self._optimizer = task.optimizer(self._model)
        self.handle = method.switch_on(self._model, pins=meter.pins)
        self.loss = torch.zeros(())

    def step(self) -> tuple[float, int]:
        """Train a step. Returns its seconds, and the host's RSS after its forward."""
        meter = self._meter
        meter.synchronize()
        start_s = time.perf_counter()
        self._optimizer.zero_grad(set_to_none=True)
        model, inputs, targets = self._model, self._inputs, self._targets
        loss = _forward(self._task, self._method, model, inputs, targets, pins=meter.pins)
        rss = rss_bytes()
        loss.backward()
        self._optimizer.step()
        meter.synchronize()
        self.loss = loss.detach()
        return time.perf_counter() - start_s, rss

    def close(self) -> None:
        """Take cswap off."""
        if self.handle is not None:
            self.handle.remove()


def _forward(
    task: Task, method: Method, model: nn.Module, inputs: Tensor, targets: Tensor, *, pins: bool
) -> Tensor:
    # The loss is left alone by every method, as users' trainers do.
    cast = task.autocast
    with nullcontext() if cast is None else torch.autocast(inputs.device.type, cast):
        with method.around(pins):
            logits = model(inputs)
        return task.loss(logits, targets)


def _line(row: Row) -> str:
    if row.failure is not None:
        return f"failed ({row.failure})"
    numbers = {
        "allocated": row.peak_allocated_bytes,
        "reserved": row.peak_reserved_bytes,
        "RSS": row.host_rss_bytes,
        "pinned": row.host_pinned_bytes,
    }
    text = ", ".join(f"{k} {v / GIB:.2f} GiB" for k, v in numbers.items() if v is not None)
    text = f"{row.step_ms:.1f} ms, {text}"
    if row.time_of_oracle is not None:
        text += f", {row.time_of_oracle:.2f} of the oracle's time"
    if row.cswap is not None:
        text += f", ratio {row.cswap['ratio']:.2f}, fallbacks {row.cswap['fallbacks']}"
    return text
