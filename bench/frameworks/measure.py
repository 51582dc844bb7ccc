"""One workload in every way: step times in turns, and the bytes held between forward and backward.

Held bytes are the growth of the allocator's bytes over a forward, once everything is encoded: the
only count that sees memory of checkpoints, compiled graphs and engines alike. Gradients are
there before.

The peak of a step, and the bytes that are left in front of the optimizer, are growth over the
moment before cswap was installed: its pools and what it keeps from step to step count.
"""

from __future__ import annotations

import copy
import gc
import statistics
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

import cswap
from bench.workloads.lockstep import same_bits
from bench.workloads.modes import PINS, scratch_bytes, settle
from bench.workloads.saved_bytes import HeapSampler, heap_bytes
from bench.workloads.turns import of_like_steps, turns

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from contextlib import AbstractContextManager

    from torch import Tensor

    from bench.frameworks.models.workload import Batch, Workload
    from cswap.api import InstallHandle

N_SETTLING: Final = 8
"""Steps that are not counted: kernels are compiled, and cswap explores and plans."""

N_LOOKS: Final = 3
"""Steps in which held bytes are measured; the median counts."""

LEARNING_RATE: Final = 1e-3

PLAIN: Final = "plain"
CHECKPOINT: Final = "checkpoint"
SAVE_ON_CPU: Final = "save_on_cpu"
CSWAP: Final[dict[str, dict[str, Any]]] = {
    "cswap": {},
    "cswap without remat": {"remat": False},
    "cswap int8": {"lossy": "int8"},
}
"""Ways with cswap, and its options; the first is the line without any."""

WAYS: Final = (PLAIN, *CSWAP, CHECKPOINT, SAVE_ON_CPU)


@dataclass(frozen=True, slots=True)
class Counted:
    """When enough steps of a workload have been counted: when both bounds are reached.

    Attributes:
        steps: fewest.
        seconds: least time of them, all ways together.
    """

    steps: int
    seconds: float = 0.0

    def goes_on(self, replicas: Sequence[Replica]) -> bool:
        """Whether another step is to be counted."""
        counted = [replica.step_s[N_SETTLING:] for replica in replicas]
        return len(counted[0]) < self.steps or sum(map(sum, counted)) < self.seconds


@dataclass(frozen=True, slots=True)
class Row:
    """One workload in one way.

    Attributes:
        workload: its name.
        way: one of `WAYS`.
        held_bytes: held between forward and backward, all encodes done.
        held_of_plain: the same over plain's.
        peak_bytes: largest growth of the allocator's bytes in a step, over the moment before cswap
            was installed.
        peak_of_plain: the same over plain's.
        left_bytes: growth over that moment in front of the optimizer.
        n_steps: counted steps.
        step_s: median over them.
        time_of_plain: median of (this way's seconds / plain's for the same step).
        time_of_plain_spread: quartiles of those quotients; None with less than two.
        bit_equal: loss and all gradients had the bits of plain's in every counted step. None if
            plain does not repeat its own bits, so that nothing can be said.
        raw_bytes: of tensors that cswap moved or computes again, in one step.
        encoded_bytes: of its encodings.
        kept_bytes: of tensors that cswap left, by reason, in one step.
        gained_of_saved: share of saved bytes, parameters left out, that cswap took off, by
            its own count.
        failure: why there are no figures, or None.
    """

    workload: str
    way: str
    held_bytes: int | None = None
    held_of_plain: float | None = None
    peak_bytes: int | None = None
    peak_of_plain: float | None = None
    left_bytes: int | None = None
    n_steps: int | None = None
    step_s: float | None = None
    time_of_plain: float | None = None
    time_of_plain_spread: tuple[float, float] | None = None
    bit_equal: bool | None = None
    raw_bytes: int | None = None
    encoded_bytes: int | None = None
    kept_bytes: dict[str, int] = field(default_factory=dict)
    gained_of_saved: float | None = None
    failure: str | None = None


class Replica:
    """One copy of a workload, in one way."""

    def __init__(self, make: Callable[[], Workload], way: str) -> None:
        """Build it; the weights are the same in every copy.

        Args:
            make: builds the workload.
            way: one of `WAYS`.
        """
        torch.manual_seed(0)
        self.way, self._made = way, make()
        self.model = self._made.model.train()
        self.optimizer = torch.optim.SGD(
            [p for p in self.model.parameters() if p.requires_grad], lr=LEARNING_RATE
        )
        self.step_s: list[float] = []
        self.held: list[int] = []
        self.peaks: list[int] = []
        self.left: list[int] = []
        self.same: list[bool] = []
        self.loss = torch.zeros(())
        if way == CHECKPOINT:
            self._made.recompute()
        self.handle: InstallHandle | None = None
        self._install()

    def _install(self) -> None:
        options = CSWAP.get(self.way)
        if options is not None:
            self.handle = cswap.install(self.model, **options)

    def close(self) -> None:
        """Switch the way off."""
        if self.handle is not None:
            self.handle.remove()
            self.handle = None

    def batch(self, step: int) -> Batch:
        """The inputs of a step, the same in every copy."""
        return self._made.batch(step)

    def step(self, number: int, batch: Batch) -> None:
        """One timed step."""
        start_s = time.perf_counter()
        self.gradients(number, batch)
        self.optimizer.step()
        self.step_s.append(time.perf_counter() - start_s)

    def look(self, number: int, batch: Batch) -> None:
        """One step in which held bytes are measured."""
        gc.collect()
        before = heap_bytes()

        def after_forward() -> None:
            settle(self.handle)
            if before is not None:
                self.held.append((heap_bytes() or 0) - before)

        self.gradients(number, batch, after_forward)

    def look_at_peaks(self) -> None:
        """Install cswap anew, settle, and measure the heap in `N_LOOKS` steps."""
        self.close()
        gc.collect()  # the old engine's pools
        before = heap_bytes()
        if before is None:
            return
        self._install()
        before -= scratch_bytes(self.handle)
        for number in range(N_SETTLING + N_LOOKS):
            batch = copy.deepcopy(self.batch(number))
            if number < N_SETTLING:
                self.gradients(number, batch)
                continue
            sampler = HeapSampler(before)
            with sampler.running():
                self.gradients(number, batch)
                self.left.append((heap_bytes() or 0) - before)
            self.peaks.append(sampler.curve.peak)

    def gradients(
        self, number: int, batch: Batch, after_forward: Callable[[], object] = nullcontext
    ) -> None:
        """Forward and backward; the number alone decides the dropout masks."""
        self.optimizer.zero_grad(set_to_none=False)
        torch.manual_seed(number)
        around: AbstractContextManager[object] = (
            torch.autograd.graph.save_on_cpu(pin_memory=PINS)
            if self.way == SAVE_ON_CPU
            else nullcontext()
        )
        with around:
            loss = self.model(**batch)
        after_forward()
        loss.backward()
        self.loss = loss.detach()

    def compare(self, plain: Replica) -> None:
        """Take down whether loss and gradients have plain's bits."""
        self.same.append(_same(self.found(), plain.found()))

    def found(self) -> list[Tensor | None]:
        """Loss and gradients of the last step."""
        return [self.loss, *(p.grad for p in self.model.parameters())]

    def repeats_itself(self) -> bool:
        """Whether the same steps give the same bits when they are run again."""
        return all(_same(self._copy_of(number), self._copy_of(number)) for number in range(N_LOOKS))

    def _copy_of(self, number: int) -> list[Tensor | None]:
        self.gradients(number, copy.deepcopy(self.batch(number)))
        return [None if found is None else found.clone() for found in self.found()]


def measure(
    name: str,
    make: Callable[[], Workload],
    ways: Sequence[str],
    counted: Counted,
    on_step: Callable[[], object],
) -> list[dict[str, Any]]:
    """Rows of one workload, as JSON-able values.

    Args:
        name: of the workload.
        make: builds it.
        ways: some of `WAYS`, plain the first.
        counted: how many steps count.
        on_step: called after each step of all ways.
    """
    failures: dict[str, str] = {}
    replicas = [r for way in ways if (r := _working(make, way, failures)) is not None]
    try:
        number = 0
        while counted.goes_on(replicas):
            number += 1
            batch = replicas[0].batch(number)
            # A step's time depends on whose step was before it: on caches, and on free memory.
            for replica in turns(replicas, number):
                replica.step(number, batch)
            for replica in replicas:
                replica.compare(replicas[0])
            on_step()
        for replica in replicas:
            for number in range(N_LOOKS):
                replica.look(number, copy.deepcopy(replica.batch(number)))
            replica.look_at_peaks()
        repeats = replicas[0].repeats_itself()
        found = {r.way: asdict(_row(name, r, replicas[0], repeats)) for r in replicas}
    finally:
        for replica in replicas:
            replica.close()
    return [found.get(w) or asdict(Row(name, w, failure=failures[w])) for w in ways]


def _working(make: Callable[[], Workload], way: str, failures: dict[str, str]) -> Replica | None:
    replica = None
    try:
        replica = Replica(make, way)
        replica.gradients(0, replica.batch(0))
    except Exception as error:  # packages raise their own
        if replica is not None:
            replica.close()
        if way == PLAIN:
            raise
        text = (str(error).splitlines() or [""])[0][:200]
        failures[way] = f"cannot run ({type(error).__name__}: {text})"
        return None
    return replica


def _same(mine: list[Tensor | None], its: list[Tensor | None]) -> bool:
    pairs = zip(mine, its, strict=True)
    return all(same_bits(a, b) for a, b in pairs if a is not None and b is not None)


def _row(name: str, replica: Replica, plain: Replica, repeats: bool) -> Row:
    mine_s = replica.step_s[N_SETTLING:]
    time_of_plain, spread = of_like_steps(mine_s, plain.step_s[N_SETTLING:])
    held, of = _median(replica.held), _median(plain.held)
    peak, peak_of = _median(replica.peaks), _median(plain.peaks)
    return Row(
        name,
        replica.way,
        held_bytes=held,
        held_of_plain=held / of if held is not None and of else None,
        peak_bytes=peak,
        peak_of_plain=peak / peak_of if peak is not None and peak_of else None,
        left_bytes=_median(replica.left),
        n_steps=len(mine_s),
        step_s=statistics.median(mine_s),
        time_of_plain=time_of_plain,
        time_of_plain_spread=spread,
        bit_equal=all(replica.same) if repeats else None,
        **_of_one_step(replica),
    )


def _median(nbytes: list[int]) -> int | None:
    return int(statistics.median(nbytes)) if nbytes else None


def _of_one_step(replica: Replica) -> dict[str, Any]:
    # cswap's decisions for the tensors of one more step.
    if replica.handle is None:
        return {}
    before = replica.handle.stats
    replica.gradients(0, replica.batch(0), lambda: settle(replica.handle))
    settle(replica.handle)
    after = replica.handle.stats
    kept = {
        reason: nbytes - before.kept_bytes_by_reason.get(reason, 0)
        for reason, nbytes in after.kept_bytes_by_reason.items()
    }
    raw = after.raw_bytes - before.raw_bytes
    encoded = after.encoded_bytes - before.encoded_bytes
    saved = raw + sum(kept.values()) - kept.get("parameter", 0)
    return {
        "raw_bytes": raw,
        "encoded_bytes": encoded,
        "kept_bytes": {reason: nbytes for reason, nbytes in kept.items() if nbytes},
        "gained_of_saved": (raw - encoded) / saved if saved else None,
    }
