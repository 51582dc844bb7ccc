"""`codec="auto"` against every codec forced, by the engine itself, in training on this CPU."""

from __future__ import annotations

import statistics
import time
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any, Final

from torch.nn import functional

import cswap
from bench.advisor.truth import LOSSLESS
from bench.codecs.recorded import trained
from bench.workloads import modes
from bench.workloads.saved_bytes import SavedBytes
from cswap.advisor.rates import DEFAULT_PRICE_S_PER_BYTE, HOOKS_S

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from torch import Tensor, nn

    from cswap.experiments.task import Batch

METERED: Final = 5
"""Steps whose peak is measured, per codec; the median counts."""

WARM: Final = 6
"""Uncounted first steps per codec, in which kernels are compiled and the advisor learns."""


def run(model: str, *, steps: int, quick: bool) -> dict[str, dict[str, float]]:
    """Cost of a step per codec; tensors that the codec does not take go raw.

    Device seconds of encodes and decodes, the peak of saved bytes by the meter of the experiments,
    the cost of both and of the hooks, and the milliseconds of the step, which the cost does not
    use. The peak is measured in further steps, since the meter takes time.

    Every codec trains the same model from the same state on the same batches; steps take turns.
    """
    ways = {}
    for codec in ("auto", *LOSSLESS):
        net, task = trained(model, quick=quick)
        ways[codec] = _Way(net, "auto" if codec == "auto" else f"static:{codec}")
    for step in range(WARM + steps + METERED):
        for way in ways.values():
            if step < WARM + steps:
                way.step(task.batch(0, step), counted=step >= WARM)
            else:
                way.meter(task.batch(0, step))
    return {codec: way.found(steps) for codec, way in ways.items()}


class _Way:
    """The model under one policy."""

    def __init__(self, net: nn.Module, policy: str) -> None:
        self._probe: Callable[[], AbstractContextManager[object]] = nullcontext
        self._net, forward = net, net.forward

        def probed(*args: Tensor) -> Any:
            with self._probe():
                return forward(*args)

        net.forward = probed  # the meter's hooks go inside of cswap's
        self._handle = cswap.install(net, policy=policy)
        self._before: tuple[float, int] | None = None
        self._after = self._spent()
        self._total_s, self._peaks = 0.0, list[int]()

    def step(self, batch: Batch, *, counted: bool) -> None:
        """One step."""
        if counted and self._before is None:
            self._before = self._spent()
        start_s = time.perf_counter()
        self._train(batch)
        if counted:
            self._total_s += time.perf_counter() - start_s
            self._after = self._spent()

    def meter(self, batch: Batch) -> None:
        """One step whose peak of saved bytes is measured."""
        owned = [*self._net.parameters(), *self._net.buffers()]
        saved = SavedBytes(owned, batch, lambda: modes.held(self._handle))
        self._probe = saved.watch
        self._train(batch)
        self._probe = nullcontext
        self._peaks.append(saved.curve.peak)

    def _train(self, batch: Batch) -> None:
        inputs, targets = batch
        functional.cross_entropy(self._net(inputs), targets).backward()
        self._net.zero_grad()

    def found(self, steps: int) -> dict[str, float]:
        """The figures of a step. Args: steps: that were counted."""
        before = self._before or self._after
        device_s, swapped = ((b - a) / steps for a, b in zip(before, self._after, strict=True))
        peak, hooks_s = statistics.median(self._peaks), HOOKS_S["cpu"] * swapped
        return {
            "device_s": device_s,
            "peak_bytes": peak,
            "hooks_s": hooks_s,
            "cost_s": device_s + hooks_s + DEFAULT_PRICE_S_PER_BYTE * peak,
            "step_ms": 1e3 * self._total_s / steps,
        }

    def _spent(self) -> tuple[float, int]:
        self._handle.engine.synchronize()
        stats = self._handle.stats
        return sum(c.encode_s + c.decode_s for c in stats.by_codec.values()), stats.swapped
