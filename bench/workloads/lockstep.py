"""Training one model in several modes in lockstep: same weights, batches and dropout masks.

Losses and gradients are compared after every step. The modes' steps take turns, and each mode's
time is compared with the time that "off" needed for the same step, so that a machine shared with
others slows both down.
"""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import dataclass, field
from statistics import fmean
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.nn import functional

from bench.workloads import modes
from bench.workloads.saved_bytes import HeapSampler, SavedBytes, heap_bytes
from bench.workloads.turns import turns

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from cswap.experiments.task import Batch, Task

N_SETTLING_STEPS = (
    2  # after a mode is switched on anew: its order of tensors is learned in the first
)


@dataclass(frozen=True, slots=True)
class Memory:
    """Memory held in one step.

    Attributes:
        peak_bytes: most bytes of saved tensors, by `bench.workloads.saved_bytes.SavedBytes`.
        raw_bytes: bytes of the tensors that the model's forward saved, each storage once; right
            only where none is encoded.
        held_bytes: bytes held for them between forward and backward, when all encodes had ended.
        swapped_bytes: raw bytes of those that were encoded.
        encoded_bytes: bytes of their encodings.
        heap_peak_bytes: largest growth of the allocator's bytes; None unless asked for and known.
    """

    peak_bytes: int
    raw_bytes: int
    held_bytes: int
    swapped_bytes: int
    encoded_bytes: int
    heap_peak_bytes: int | None


@dataclass(slots=True)
class Log:
    """The record of one mode, step by step; loss and accuracy are of the last validation."""

    step_s: list[float] = field(default_factory=list)
    same_bits: list[bool] = field(default_factory=list)
    grad_diffs: list[float] = field(default_factory=list)
    memories: list[Memory] = field(default_factory=list)
    loss: float = float("nan")
    accuracy: float = float("nan")
    fallbacks: int = 0


class Replica:
    """One model in one mode, with its optimizer and its log."""

    def __init__(self, task: Task, mode: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.mode, self.seed = task, mode, seed
        self.model = task.build()
        self.optimizer = task.optimizer(self.model)
        self.method = modes.method(mode)
        self.handle = self.method.switch_on(self.model, pins=modes.PINS)
        self.log = Log()
        self.loss = torch.tensor(float("nan"))

    def close(self) -> None:
        """Switch the mode off."""
        if self.handle is not None:
            self.log.fallbacks += self.handle.stats.fallbacks
            self.handle.remove()
            self.handle = None

    def compute_gradients(
        self, batch: Batch, step: int, after_forward: Callable[[], object] = nullcontext
    ) -> None:
        """Forward and backward; the seed and the step alone decide the dropout masks."""
        inputs, targets = batch
        torch.manual_seed(self.seed * 1_000_003 + step)
        with self.method.around(modes.PINS):
            logits = self.model(inputs)
        loss = functional.cross_entropy(logits, targets)
        after_forward()
        loss.backward()
        self.loss = loss.detach()

    def train_step(self, batch: Batch, step: int) -> None:
        """One timed step."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.lr(step)
        started_s = time.perf_counter()
        self.optimizer.zero_grad(set_to_none=False)
        self.compute_gradients(batch, step)
        self.optimizer.step()
        self.log.step_s.append(time.perf_counter() - started_s)

    def gradients(self) -> Iterator[Tensor]:
        """Yield the gradient of every parameter."""
        for parameter in self.model.parameters():
            if parameter.grad is not None:
                yield parameter.grad

    def compare(self, off: Replica) -> None:
        """Log whether loss and all gradients have the bits of "off", and how far they are apart."""
        pairs = list(zip(self.gradients(), off.gradients(), strict=True))
        same = all(same_bits(mine, its) for mine, its in [*pairs, (self.loss, off.loss)])
        self.log.same_bits.append(same)
        self.log.grad_diffs.append(max(float((mine - its).abs().max()) for mine, its in pairs))

    def validate(self) -> None:
        """Log loss and accuracy on the held-out data."""
        self.model.eval()
        losses, hits = [], []
        with torch.no_grad():
            for inputs, targets in self.task.validation:
                logits = self.model(inputs)
                losses.append(float(functional.cross_entropy(logits, targets)))
                hits.append(float((logits.argmax(1) == targets).double().mean()))
        self.model.train()
        self.log.loss, self.log.accuracy = fmean(losses), fmean(hits)

    def measure(self, n_steps: int, *, with_heap: bool) -> None:
        """Log the bytes that one step holds; the weights stay as they are.

        Args:
            n_steps: training steps done.
            with_heap: also sample the allocator. The mode is then switched on anew, so that
                whatever it keeps from step to step counts as growth.
        """
        batch = self.task.batch(self.seed, n_steps)
        heap_peak = self._measure_heap(batch, n_steps) if with_heap else None
        between = self._measure_between(batch, n_steps)
        peak = self._measure_peak(batch, n_steps)
        self.log.memories.append(Memory(peak, *between, heap_peak))

    def _saved_bytes(self, batch: Batch) -> SavedBytes:
        owned = [*self.model.parameters(), *self.model.buffers()]
        return SavedBytes(owned, batch, lambda: modes.held(self.handle))

    def _measure_peak(self, batch: Batch, n_steps: int) -> int:
        saved = self._saved_bytes(batch)
        self.model.probe = saved.watch
        with saved.watch():
            self.compute_gradients(batch, n_steps, after_forward=saved.sample)
        self.model.probe = nullcontext
        saved.sample()
        return saved.curve.peak

    def _measure_between(self, batch: Batch, n_steps: int) -> tuple[int, int, int, int]:
        # raw_bytes to encoded_bytes of Memory
        saved = self._saved_bytes(batch)
        before, found = modes.totals(self.handle), []

        def look() -> None:
            modes.settle(self.handle)
            saved.sample()
            after = modes.totals(self.handle)
            swapped, encoded = (b - a for a, b in zip(before, after, strict=True))
            found.append((saved.raw_bytes, saved.curve.nbytes[-1], swapped, encoded))

        self.model.probe = saved.watch
        self.compute_gradients(batch, n_steps, after_forward=look)
        self.model.probe = nullcontext
        return found[0]

    def _measure_heap(self, batch: Batch, n_steps: int) -> int | None:
        self.close()
        gc.collect()  # the old engine's pool
        baseline_bytes = heap_bytes()
        self.handle = self.method.switch_on(self.model, pins=modes.PINS)
        if baseline_bytes is None:
            return None
        for _ in range(N_SETTLING_STEPS):
            self.compute_gradients(batch, n_steps)
        sampler = HeapSampler(baseline_bytes - modes.scratch_bytes(self.handle))
        with sampler.running():
            self.compute_gradients(batch, n_steps)
        return sampler.curve.peak


def same_bits(mine: Tensor | None, its: Tensor | None) -> bool:
    """Compare as integers: NaN equals itself, and 0.0 differs from -0.0. None equals None alone."""
    if mine is None or its is None:
        return mine is its
    return torch.equal(mine.view(torch.int32), its.view(torch.int32))


class Lockstep:
    """Trains one task in several modes, step by step in turns.

    Args:
        task: model and data.
        chosen: modes; the first is "off", which the others are compared with.
        seed: of weights, batches and dropout.
    """

    def __init__(self, task: Task, chosen: Sequence[str], seed: int) -> None:
        self.task, self.seed = task, seed
        self.replicas = [Replica(task, mode, seed) for mode in chosen]

    def run(self, on_step: Callable[[], object]) -> None:
        """Train to the end; memory is measured before, in the middle and after."""
        self._look(0)
        for step in range(self.task.n_steps):
            batch = self.task.batch(self.seed, step)
            for replica in turns(self.replicas, step):
                replica.train_step(batch, step)
            for replica in self.replicas:
                replica.compare(self.replicas[0])
            self._look(step + 1)
            on_step()

    def _look(self, n_steps: int) -> None:
        last = n_steps == self.task.n_steps
        for replica in self.replicas if last or n_steps in (0, self.task.n_steps // 2) else ():
            if last:
                replica.validate()
            replica.measure(n_steps, with_heap=last)

    def close(self) -> None:
        """Switch every mode off."""
        for replica in self.replicas:
            replica.close()
