"""Goals of one model: held by cswap, and by checkpointing as many blocks as that takes."""

from __future__ import annotations

import gc
import time
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Final

import torch

import cswap
from bench.fit.models import WithLoss
from bench.workloads import modes
from bench.workloads.lockstep import same_bits
from bench.workloads.saved_bytes import HeapSampler, SavedBytes, heap_bytes
from bench.workloads.tasks import make_task
from bench.workloads.turns import of_like_steps, turns
from cswap.errors import GoalError
from cswap.fit.resident import Resident

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.api import InstallHandle
    from cswap.experiments.task import Batch, Task

OFF: Final = "off"
FIT: Final = "fit"
CHECKPOINT: Final = "checkpoint"
SEED: Final = 0
SETTLING: Final = 50
"""Steps before the counted ones: a goal explores, plans and corrects in them."""

PATIENCE_S: Final = 0.05
"""Between settling steps: plans are made on a thread of their own."""


@dataclass(frozen=True, slots=True)
class Row:
    """One model in one goal, by one method.

    Attributes:
        model: the task's name.
        share: of off's saved bytes that the goal leaves; None: of off.
        method: OFF, FIT or CHECKPOINT.
        goal_bytes: the goal; None: of off.
        peak_bytes: measured: resident bytes plus the peak of saved bytes, by the benchmark's own
            meter, the highest of three steps.
        held: whether that is within the goal.
        predicted_bytes: by cswap's plan.
        smallest_bytes: of a goal that cannot be reached, the smallest that cswap says can be.
        heap_bytes: growth of the heap in a step at its peak; None where libc does not say.
        time_of_off: median of the quotients of like steps.
        time_of_off_spread: their quartiles.
        added_of_checkpoint: time added to a step, over the time that checkpointing adds.
        predicted_time_of_off: by cswap's plan, of forward and backward.
        bit_equal: whether all gradients had the bits of off's in every counted step.
        how: blocks that are checkpointed, or cswap's ways for the tensors.
    """

    model: str
    share: float | None
    method: str
    goal_bytes: int | None = None
    peak_bytes: int | None = None
    held: bool | None = None
    predicted_bytes: int | None = None
    smallest_bytes: int | None = None
    heap_bytes: int | None = None
    time_of_off: float | None = None
    time_of_off_spread: tuple[float, float] | None = None
    added_of_checkpoint: float | None = None
    predicted_time_of_off: float | None = None
    bit_equal: bool | None = None
    how: str = ""


class Contender:
    """One way to train a task.

    Args:
        task: model and data.
        goal_bytes: of cswap's ``fit``; None: without cswap.
        n_checkpointed: first blocks under checkpointing.

    Attributes:
        step_s: seconds of the counted steps.
        same_bits: of the counted steps.
    """

    def __init__(
        self, task: Task, *, goal_bytes: int | None = None, n_checkpointed: int = 0
    ) -> None:
        torch.manual_seed(SEED)
        self._task = task
        self.model = WithLoss(task.build())
        self.model.checkpoint(self.model.blocks[:n_checkpointed])
        self.optimizer = task.optimizer(self.model.net)
        self.handle: InstallHandle | None = None
        if goal_bytes is not None:
            self.handle = cswap.install(self.model, fit=goal_bytes)
        self.step_s: list[float] = []
        self.same_bits: list[bool] = []

    def step(self, step: int, *, counted: bool = False) -> None:
        """One step; batch and dropout depend on its number alone."""
        batch = self._task.batch(SEED, step)
        started_s = time.perf_counter()
        self._gradients(batch, step)
        self.optimizer.step()
        if counted:
            self.step_s.append(time.perf_counter() - started_s)

    def peak_saved(self, step: int) -> int:
        """Peak of saved bytes in one step; the weights stay as they are."""
        batch = self._task.batch(SEED, step)
        owned = [*self.model.parameters(), *self.model.buffers()]
        saved = SavedBytes(owned, batch, lambda: modes.held(self.handle))
        self.model.probe = saved.watch
        self._gradients(batch, step)
        self.model.probe = nullcontext
        return saved.curve.peak

    def heap_growth(self, step: int) -> int | None:
        """Peak of the heap in one step above its bytes before."""
        gc.collect()
        baseline = heap_bytes()
        if baseline is None:
            return None
        sampler = HeapSampler(baseline)
        with sampler.running():
            self._gradients(self._task.batch(SEED, step), step)
        return sampler.curve.peak

    def compare(self, off: Contender) -> None:
        """Note whether all gradients have the bits of off's."""
        pairs = zip(self.model.parameters(), off.model.parameters(), strict=True)
        self.same_bits.append(all(same_bits(mine.grad, its.grad) for mine, its in pairs))

    def close(self) -> None:
        """Take cswap off."""
        if self.handle is not None:
            self.handle.remove()

    def _gradients(self, batch: Batch, step: int) -> None:
        self.optimizer.zero_grad()
        torch.manual_seed(step)
        self.model(*batch).backward()


@dataclass(frozen=True, slots=True)
class _Sizes:
    resident_bytes: int
    saved_bytes: int

    def goal(self, share: float) -> int:
        return int(self.resident_bytes + share * self.saved_bytes)


def measure(
    name: str,
    *,
    shares: list[float],
    rounds: int,
    least_s: float,
    quick: bool,
    on_step: Callable[[], object],
) -> list[dict[str, Any]]:
    """Rows of one model, as JSON-able values.

    Args:
        name: of the model.
        shares: of the saved bytes, of which goals are made.
        rounds: fewest counted steps of each method, in turns.
        least_s: seconds that all counted steps take at least.
        quick: small model.
        on_step: called after every counted round.
    """
    task = make_task(name, quick=quick, n_steps=None)
    sizes = _sizes(task)
    off = Contender(task)
    found: dict[tuple[float | None, str], Contender | GoalError | None] = {(None, OFF): off}
    blocks: dict[float, int | None] = {}
    for share in shares:
        blocks[share] = _blocks_needed(task, share * sizes.saved_bytes)
        fit = Contender(task, goal_bytes=sizes.goal(share))
        found[share, FIT] = _settled(fit)
        n = blocks[share]
        plain = None if n is None else Contender(task, n_checkpointed=n)
        found[share, CHECKPOINT] = None if plain is None else _settled(plain)
    _settled(off)
    running = {key: one for key, one in found.items() if isinstance(one, Contender)}
    try:
        race = list(running.values())
        ends_s, round_ = time.perf_counter() + least_s, 0
        while round_ < rounds or time.perf_counter() < ends_s:
            _run_round(race, off, round_)
            on_step()
            round_ += 1
        rows = [_row(name, key, one, sizes, blocks, off) for key, one in found.items()]
    finally:
        for one in running.values():
            one.close()
    return [asdict(row) for row in rows]


def _sizes(task: Task) -> _Sizes:
    one = Contender(task)
    resident = Resident(one.model)
    try:
        one.step(0)
        return _Sizes(resident.nbytes, one.peak_saved(1))
    finally:
        resident.remove()


def _blocks_needed(task: Task, limit_bytes: float) -> int | None:
    # The fewest first blocks whose checkpointing holds the limit; None: not even all do.
    for n in range(len(Contender(task).model.blocks) + 1):
        if Contender(task, n_checkpointed=n).peak_saved(0) <= limit_bytes:
            return n
    return None


def _settled(one: Contender) -> Contender | GoalError:
    # Every contender does the same steps, so that their weights stay equal.
    try:
        for step in range(SETTLING):
            one.step(step)
            if one.handle is not None:
                time.sleep(PATIENCE_S)
    except GoalError as error:
        one.close()
        return error
    return one


def _run_round(race: list[Contender], off: Contender, round_: int) -> None:
    for one in turns(race, round_):
        one.step(SETTLING + round_, counted=True)
    for one in race:
        one.compare(off)


def _row(
    name: str,
    key: tuple[float | None, str],
    one: Contender | GoalError | None,
    sizes: _Sizes,
    blocks: dict[float, int | None],
    off: Contender,
) -> Row:
    share, method = key
    goal_bytes = None if share is None else sizes.goal(share)
    if not isinstance(one, Contender):
        smallest = one.smallest_bytes if isinstance(one, GoalError) else None
        return Row(
            name, share, method, goal_bytes, smallest_bytes=smallest, how="cannot be reached"
        )
    step = SETTLING + len(one.step_s)
    peak = sizes.resident_bytes + max(one.peak_saved(step + i) for i in range(3))
    time_of_off, spread = of_like_steps(one.step_s, off.step_s)
    n = None if share is None else blocks[share]
    goal = None if one.handle is None else one.handle.goal
    return Row(
        name,
        share,
        method,
        goal_bytes,
        peak_bytes=peak,
        held=None if goal_bytes is None else peak <= goal_bytes,
        predicted_bytes=None if goal is None else goal.predicted_bytes,
        heap_bytes=one.heap_growth(step),
        time_of_off=time_of_off,
        time_of_off_spread=spread,
        predicted_time_of_off=None if goal is None else goal.predicted_slowdown,
        bit_equal=all(one.same_bits),
        how=_how(one, n if method == CHECKPOINT else None),
    )


def _how(one: Contender, n_blocks: int | None) -> str:
    if n_blocks is not None:
        return f"{n_blocks} of {len(one.model.blocks)} blocks"
    goal = None if one.handle is None else one.handle.goal
    if goal is None:
        return ""
    return ", ".join(f"{count} {action}" for action, count in sorted(goal.actions.items()))
