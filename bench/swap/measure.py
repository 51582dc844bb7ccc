"""One model trained in every way, steps in turns, and plain copies of as many bytes beside them."""

from __future__ import annotations

import time
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

from bench.workloads.lockstep import Lockstep, Replica
from bench.workloads.methods import OFF, NotInstalledError
from bench.workloads.turns import of_like_steps
from cswap.experiments.timing import Timing, timing_of

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.experiments.task import Task

SEED: Final = 0
N_SETTLING_TIMES: Final = 3
"""The first steps of a run meet cold caches and are not timed."""

MEMCPY: Final = "memcpy, out and back"
"""The physical limit: as many bytes as the model saves, copied once there and once back."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model trained in one way.

    Attributes:
        model: the task's name.
        method: the way; MEMCPY's time is that of the copies alone, without a training step.
        step: seconds of a step: forward, loss, backward, optimizer.
        time_of_off: median over the steps of (this method's seconds / off's for the same step).
        time_of_off_spread: quartiles of those quotients.
        peak_saved_bytes: most bytes that saved tensors held in a step, copies of them included.
        peak_of_off: the same over off's.
        held_bytes: bytes held between forward and backward, after all encodes.
        heap_peak_bytes: largest growth of malloc's allocated bytes in a step, over the bytes before
            the method was switched on; None if the C library does not report them.
        moved_bytes: raw bytes of the model's saved tensors, without parameters.
        ratio: these bytes over the same with every encoded tensor at its encoded size.
        final_loss: validation loss after the last step.
        accuracy: validation accuracy then, 0 to 1.
        bit_equal: loss and every gradient had the bits of off in every step.
        max_grad_diff: largest absolute difference of a gradient element from off's.
        fallbacks: times that cswap took a slower path after a failure.
        failure: why there are no figures, or None.
    """

    model: str
    method: str
    step: Timing | None = None
    time_of_off: float | None = None
    time_of_off_spread: tuple[float, float] | None = None
    peak_saved_bytes: int | None = None
    peak_of_off: float | None = None
    held_bytes: int | None = None
    heap_peak_bytes: int | None = None
    moved_bytes: int | None = None
    ratio: float | None = None
    final_loss: float | None = None
    accuracy: float | None = None
    bit_equal: bool | None = None
    max_grad_diff: float | None = None
    fallbacks: int = 0
    failure: str | None = None


class Copies:
    """Copies the bytes that a step saves, from memory to memory and back.

    Args:
        nbytes: bytes of one direction.
    """

    def __init__(self, nbytes: int) -> None:
        self._here = torch.zeros(nbytes, dtype=torch.uint8)
        self._there = torch.zeros(nbytes, dtype=torch.uint8)
        self.seconds: list[float] = []

    def run(self) -> None:
        """Copy once there and once back, and note the seconds."""
        start_s = time.perf_counter()
        self._there.copy_(self._here)
        self._here.copy_(self._there)
        self.seconds.append(time.perf_counter() - start_s)


def train(
    task: Task, methods: Sequence[str], on_step: Callable[[], object]
) -> list[dict[str, Any]]:
    """Rows of one model, as JSON-able values.

    Args:
        task: the model and its number of steps.
        methods: methods by name; off is the first.
        on_step: called after every step of all methods.
    """
    failures = {method: _failure(task, method) for method in methods}
    working = [method for method in methods if failures[method] is None]
    run = Lockstep(task, working, SEED)
    copies: list[Copies] = []

    def stepped() -> None:
        if not copies:
            copies.append(Copies(_moved_bytes(run)))
        copies[0].run()
        on_step()

    try:
        run.run(stepped)
    finally:
        run.close()
    found = {replica.mode: _row(replica, run) for replica in run.replicas}
    rows = [found.get(m) or Row(task.name, m, failure=failures[m]) for m in methods]
    return [asdict(row) for row in (*rows, _memcpy_row(run, copies[0]))]


def _failure(task: Task, method: str) -> str | None:
    # One step on a separate model compiles kernels, and shows why a method cannot run here.
    try:
        replica = Replica(task, method, SEED)
        try:
            replica.compute_gradients(task.batch(SEED, 0), 0)
        finally:
            replica.close()
    except NotInstalledError as error:
        return str(error)
    except Exception as error:  # a peer that needs a GPU fails in a way of its own
        text = (str(error).splitlines() or [""])[0][:200]
        return f"cannot run on this device ({type(error).__name__}: {text})"
    return None


def _moved_bytes(run: Lockstep) -> int:
    # Off is the first replica, and was measured before the first step.
    return run.replicas[0].log.memories[0].raw_bytes


def _counted(seconds: list[float]) -> list[float]:
    return seconds[min(N_SETTLING_TIMES, len(seconds) - 1) :]


def _row(replica: Replica, run: Lockstep) -> Row:
    log, off = replica.log, run.replicas[0].log
    time_of_off, spread = of_like_steps(_counted(log.step_s), _counted(off.step_s))
    peak, its = (max(memory.peak_bytes for memory in one.memories) for one in (log, off))
    memory, raw = log.memories[-1], off.memories[-1].raw_bytes
    return Row(
        model=run.task.name,
        method=replica.mode,
        step=timing_of(_counted(log.step_s)),
        time_of_off=time_of_off,
        time_of_off_spread=spread,
        peak_saved_bytes=peak,
        peak_of_off=peak / its if its else None,
        held_bytes=memory.held_bytes,
        heap_peak_bytes=memory.heap_peak_bytes,
        moved_bytes=_moved_bytes(run),
        ratio=raw / (raw - memory.swapped_bytes + memory.encoded_bytes),
        final_loss=log.loss,
        accuracy=log.accuracy,
        bit_equal=all(log.same_bits),
        max_grad_diff=max(log.grad_diffs),
        fallbacks=log.fallbacks,
    )


def _memcpy_row(run: Lockstep, copies: Copies) -> Row:
    off = next(replica.log.step_s for replica in run.replicas if replica.mode == OFF)
    time_of_off, spread = of_like_steps(_counted(copies.seconds), _counted(off))
    return Row(
        model=run.task.name,
        method=MEMCPY,
        step=timing_of(_counted(copies.seconds)),
        time_of_off=time_of_off,
        time_of_off_spread=spread,
        moved_bytes=_moved_bytes(run),
    )
