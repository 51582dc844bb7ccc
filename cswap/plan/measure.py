"""Measures the trace of a real step on this machine: operators, durations and tensor values."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from cswap.codecs.base import takes
from cswap.codecs.layout import flatten
from cswap.codecs.registry import get_codec
from cswap.config import MIN_BYTES
from cswap.cuda_streams import spin
from cswap.errors import TraceError
from cswap.plan.tracing.assemble import assemble
from cswap.plan.tracing.operators import tensors_in
from cswap.plan.tracing.recorder import Recorder
from cswap.plan.tracing.step import as_tuple, batch_of, gradients, resident_bytes, run_step
from cswap.profiler import LateProfile, profile

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.codecs.base import Codec
    from cswap.plan.tracing.positions import SavedRegion
    from cswap.plan.tracing.recorder import RecordedOperator
    from cswap.schema.tensor import TensorProfile
    from cswap.schema.trace import Trace

SPREADS = (1, 3, 7, 15)
"""Names of `TensorProfile.spread`'s entries in a trace: ``spread_1`` and so on."""


def measure(
    model: torch.nn.Module,
    inputs: Any,
    loss: Callable[..., torch.Tensor],
    targets: Any = (),
    *,
    optimizer: torch.optim.Optimizer | None = None,
    warm_up: int = 2,
    repeats: int = 5,
    min_bytes: int | None = None,
    swap_loss: bool = False,
    profiles: bool = True,
    codecs: Sequence[str] = (),
    name: str = "",
    hardware: str = "",
) -> Trace:
    """Measure the trace of one training step. The model trains during the measurement.

    A duration is the time of one operator on the device. The time of Python and of the hooks
    between operators is not included. Afterwards all gradients are None.

    Args:
        model: a model on the device to be measured.
        inputs: one batch, on the model's device: a tensor or a tuple of arguments.
        loss: called as ``loss(output, *targets)``; returns a scalar.
        targets: a tensor or a tuple.
        optimizer: optimizer of the model's parameters; None: the step ends with backward.
        warm_up: unmeasured steps before the measured ones; they also create the optimizer's state.
        repeats: measured steps; an operator's duration is the median over them.
        min_bytes: as for `cswap.estimate`; default: the engine's default for the device.
        swap_loss: as for `cswap.estimate`.
        profiles: whether to profile every saved tensor, in one additional step.
        codecs: codecs whose ratios are measured, in the additional step, on every saved tensor
            that they accept.
        name: name of the trace; default: the model's class.
        hardware: name of the machine; default: the device's name.

    Raises:
        TraceError: an option is wrong, or the steps differ in their operators.
        UnknownCodecError: an option names a codec that does not exist.
    """
    for option, value, least in (("warm_up", warm_up, 0), ("repeats", repeats, 1)):
        if value < least:
            raise TraceError(f"{option}={value!r}: must be an integer >= {least}.")
    sampler = _Sampler(profiles, [get_codec(codec) for codec in codecs])
    arguments = (as_tuple(inputs), loss, as_tuple(targets), optimizer)
    step = _Step(model, *arguments, min_bytes, swap_loss)
    for _ in range(warm_up):
        step.run(None)
    recorders, durations, lead_s = [], [], 0.0
    for _ in range(repeats):
        timer, start = _timer(step.device, lead_s), time.perf_counter()
        recorders.append(step.run(timer))
        lead_s = max(lead_s, time.perf_counter() - start)
        durations.append(timer.seconds([o.mark for o in recorders[-1].operators]))
    _check_equal([recorder.operators for recorder in recorders])
    if profiles or codecs:
        recorders.append(step.run(None, sampler))
        _check_equal([recorder.operators for recorder in recorders[-2:]])
    step.forget_gradients()
    return assemble(
        recorders[-1],
        [statistics.median(row) for row in zip(*durations, strict=True)],
        resident_bytes=resident_bytes(model, step.state()),
        name=name or type(model).__name__,
        batch=batch_of(step.inputs),
        source="measured",
        hardware=hardware or _device_name(step.device),
    )


@dataclass(slots=True)
class _Step:
    """The step that is run repeatedly."""

    model: torch.nn.Module
    inputs: tuple[Any, ...]
    loss: Callable[..., torch.Tensor]
    targets: tuple[Any, ...]
    optimizer: torch.optim.Optimizer | None
    min_bytes: int | None
    swap_loss: bool

    @property
    def device(self) -> torch.device:
        tensors = [*self.model.parameters(), *tensors_in(self.inputs)]
        return tensors[0].device

    def state(self) -> list[torch.Tensor]:
        values = [] if self.optimizer is None else list(self.optimizer.state.values())
        return tensors_in(values)

    def run(self, timer: _Timer | None, sampler: _Sampler | None = None) -> Recorder:
        """Run one step under a recorder; with a timer, its operators have marks."""
        self.forget_gradients()
        minimum = self.min_bytes
        recorder = Recorder(
            [*self.model.parameters(), *self.model.buffers(), *self.state()],
            min_bytes=MIN_BYTES.get(self.device.type, 0) if minimum is None else minimum,
            timer=timer,
            sampler=sampler,
        )
        run_step(
            recorder,
            self.model,
            self.inputs,
            self.loss,
            self.targets,
            swap_loss=self.swap_loss,
        )
        recorder.add("optimizer", gradients(self.model), 0.0)
        clock = timer or _Timer()
        mark = clock.start()
        if self.optimizer is not None:
            self.optimizer.step()
        clock.stop(mark)
        recorder.operators[-1].mark = mark
        return recorder

    def forget_gradients(self) -> None:
        for parameter in self.model.parameters():
            parameter.grad = None


class _Timer:
    """Measures with the CPU's clock: an operator is finished when it returns."""

    def start(self) -> list[Any]:
        """Note the start of an operator; returns its mark."""
        return [time.perf_counter()]

    def stop(self, mark: list[Any]) -> None:
        """Note the end of the operator with this mark."""
        mark.append(time.perf_counter())

    def seconds(self, marks: Sequence[list[Any]]) -> list[float]:
        """Seconds of each operator."""
        return [float(end - start) for start, end in marks]


class _CudaTimer(_Timer):
    """Measures with events in the stream before and after each operator.

    If the device waited for the host between an event and the next kernel, the measurement would
    include the wait. So the device first sleeps for the time that the host needs for a step. If the
    host falls behind by more than that, short operators appear longer than they are.
    """

    def __init__(self, lead_s: float) -> None:
        torch.cuda.synchronize()
        spin(lead_s)

    def start(self) -> list[Any]:
        return [self._event()]

    def stop(self, mark: list[Any]) -> None:
        mark.append(self._event())

    def seconds(self, marks: Sequence[list[Any]]) -> list[float]:
        torch.cuda.synchronize()
        return [float(start.elapsed_time(end)) / 1e3 for start, end in marks]

    @staticmethod
    def _event() -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event


class _Sampler:
    """Takes profile and ratios of the bytes that the engine would swap for a saved tensor."""

    def __init__(self, profiles: bool, codecs: Sequence[Codec]) -> None:
        self._profiles, self._codecs = profiles, codecs

    def __call__(
        self, tensor: torch.Tensor, region: SavedRegion
    ) -> tuple[dict[str, float], dict[str, float]]:
        """Return the numbers of the profile, and the ratio by codec."""
        with _disable_current_modes(), torch.no_grad():
            x = _flat(tensor, region)
            found = _profile(x) if self._profiles else None
            kind = x.device.type
            codecs = [codec for codec in self._codecs if takes(codec, x.dtype, kind)]
            ratios = {codec.name: codec.encode(x).ratio for codec in codecs}
        return ({} if found is None else numbers_of(found)), ratios


def _flat(tensor: torch.Tensor, region: SavedRegion) -> torch.Tensor:
    if region.layout is not None:
        return flatten(tensor)
    itemsize = tensor.element_size()
    return tensor.as_strided((region.nbytes // itemsize,), (1,), region.start // itemsize)


def _profile(x: torch.Tensor) -> TensorProfile | None:
    if not x.is_cuda:
        return profile(x)
    late = LateProfile(x)
    torch.cuda.synchronize(x.device)
    return late.get()


def numbers_of(found: TensorProfile) -> dict[str, float]:
    """A profile as `TraceTensor.profile` has it."""
    names = ("zero_fraction", "repeat_fraction", "non_finite", "amax", "zero_exponent")
    numbers = {name: float(getattr(found, name)) for name in names}
    for name in ("spread", "spread_nonzero"):
        shares = getattr(found, name)
        numbers |= {f"{name}_{b}": s for b, s in zip(SPREADS, shares, strict=bool(shares))}
    if found.int_bits is not None:
        numbers["int_bits"] = found.int_bits
    return numbers


def _timer(device: torch.device, lead_s: float) -> _Timer:
    return _CudaTimer(lead_s) if device.type == "cuda" else _Timer()


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else device.type


def _check_equal(steps: Sequence[Sequence[RecordedOperator]]) -> None:
    names = [[(operator.module, operator.name) for operator in step] for step in steps]
    for other in names[1:]:
        if other != names[0]:
            raise TraceError(
                f"measure: steps differ ({len(names[0])} and {len(other)} operators): a plan needs "
                "a model that does the same in every step. Pass repeats=1, profiles=False to take "
                "one step as it is."
            )
