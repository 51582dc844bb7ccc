"""A plain step on the twin as a trace to plan for: `python -m bench.twin.tracing JSON` prints it.

It is a measured trace (`cswap.plan.measure`) but for two things: an operator's duration is the time
that its work takes on the twin's compute stream, and profiles and ratios are those that the twin
gives to tensors without values (`values.py`).
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final

from bench.twin import worker

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.plan.tracing.positions import SavedRegion
    from cswap.plan.tracing.recorder import Recorder
    from cswap.schema.trace import Trace

CODECS: Final = ("zvc", "expk", "zvc+expk", "bitpack")
"""Lossless codecs that a plan may choose."""


class _Timer:
    """Durations by the work that was issued meanwhile; a mark is the number of spans, then s."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def start(self) -> list[float]:
        return [len(self._cuda.spans)]

    def stop(self, mark: list[float]) -> None:
        spans = self._cuda.spans[int(mark[0]) :]
        mark.append(round(sum(s.ended_s - s.began_s for s in spans), 12))


class _Sampler:
    """Profile and ratios of a tensor that has no values."""

    def __init__(self, cuda: Any) -> None:
        self._cuda = cuda

    def __call__(
        self, tensor: torch.Tensor, region: SavedRegion
    ) -> tuple[dict[str, float], dict[str, float]]:
        from bench.twin.values import profile_for  # imports cswap, which the twin has to precede
        from cswap.advisor.candidates import foretold_ratio
        from cswap.codecs.base import takes
        from cswap.codecs.registry import get_codec
        from cswap.plan.measure import numbers_of

        del region  # the whole tensor stands for it
        known = profile_for(self._cuda, tensor)
        codecs = [c for c in map(get_codec, CODECS) if takes(c, tensor.dtype, "cuda")]
        ratios = {c.name: foretold_ratio(c, known) or 1.0 for c in codecs}
        return numbers_of(known), ratios


class _Step(worker.Step):
    """A step under the recorder; ``recorder`` is that of the last one."""

    recorder: Recorder
    _seen = 0

    def _train(self) -> None:
        from cswap.config import MIN_BYTES
        from cswap.plan.tracing.recorder import Recorder
        from cswap.plan.tracing.step import gradients, run_step

        net, (x, y), timer = self._net, self._inputs, _Timer(self._cuda)
        net.zero_grad()
        self.recorder = recorder = Recorder(
            [*net.parameters(), *net.buffers(), *self._states],
            min_bytes=MIN_BYTES["cuda"],
            timer=timer,
            sampler=_Sampler(self._cuda),
        )
        forward, cast = net.forward, self._autocast()
        net.forward = cast(forward)
        # With the loss's tensors, since some are held longer than operators read them.
        run_step(recorder, net, (x,), self._noted(cast(self._task.loss)), (y,), swap_loss=True)
        net.forward = forward
        recorder.add("optimizer", gradients(net), 0.0)
        mark = timer.start()
        self._update()
        timer.stop(mark)
        recorder.operators[-1].mark = mark

    def _noted(self, loss: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        # The engine's hooks are off when it is called: how many tensors it has seen until then.
        def call(*arguments: torch.Tensor) -> torch.Tensor:
            self._seen = self.recorder.n_saved
            return loss(*arguments)

        return call

    def trace(self, profile: str) -> Trace:
        """Of the last step. Args: profile: name of the machine."""
        from cswap.plan.tracing.assemble import assemble
        from cswap.plan.tracing.step import resident_bytes

        made = assemble(
            self.recorder,
            [operator.mark[1] for operator in self.recorder.operators],
            resident_bytes=resident_bytes(self._net, self._states),
            name=self._task.name,
            batch=self._task.batch,
            source="measured",
            hardware=profile,
        )
        tensors = [t if t.saved < self._seen else replace(t, saved=-1) for t in made.tensors]
        return replace(made, tensors=tuple(tensors))


def record(model: str, profile: str) -> dict[str, Any]:
    """The trace of a model's step, by name, on the profile of that name; once in a process."""
    made: list[_Step] = []

    class Step(_Step):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            made.append(self)

    worker.run(model, "plain", profile, n_steps=2, step_type=Step)
    return made[0].trace(profile).to_dict()


if __name__ == "__main__":
    print(json.dumps(record(**json.loads(sys.argv[1]))))
