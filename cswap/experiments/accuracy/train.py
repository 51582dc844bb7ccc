"""Matched training runs: per seed the same weights, batches and dropout masks."""

from __future__ import annotations

from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Final

import torch

import cswap

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from torch import Tensor, nn

    from cswap.experiments.task import Task

_WILLING: Final[dict[str, Any]] = {"slowdown": 2.0}
"""A high price of a byte: small models then swap the tensors that large ones swap, such as the
inputs of norms."""

POLICIES: Final[dict[str, dict[str, Any] | None]] = {
    "off": None,
    "lossless": _WILLING,
    "bf16": {"lossy": "bf16", **_WILLING},
    "int8": {"lossy": "int8", **_WILLING},
    "fp8": {"lossy": "fp8", **_WILLING},
    "int4": {"lossy": "int4", **_WILLING},
}
"""Options of `cswap.install` by policy; None: not installed."""

SETTLING: Final = 3
"""Steps whose bytes are not counted: the advisor is still learning."""


@dataclass(slots=True)
class Run:
    """One model trained under one policy from one seed.

    Attributes:
        losses: per step.
        validation_loss: mean, in nats, after the last step.
        accuracy: validation accuracy, 0 to 1.
        same_bits: whether loss and every parameter had the bits of plain training at every step.
        eligible_bytes: bytes of the tensors that could be swapped in a step.
        held_bytes: bytes of the encodings in their place, and of those tensors that stay.
        by_codec: raw and encoded bytes per step, by codec.
    """

    policy: str
    seed: int
    losses: list[float] = field(default_factory=list)
    validation_loss: float = float("nan")
    accuracy: float = float("nan")
    same_bits: bool = True
    eligible_bytes: float = 0.0
    held_bytes: float = 0.0
    by_codec: dict[str, dict[str, float]] = field(default_factory=dict)


class Trained:
    """A model in training under a policy."""

    def __init__(self, task: Task, policy: str, seed: int) -> None:
        torch.manual_seed(seed)
        self.task, self.seed, self.run = task, seed, Run(policy, seed)
        self.model = task.build()
        self.optimizer = task.optimizer(self.model)
        options = POLICIES[policy]
        self.handle = None if options is None else cswap.install(self.model, **options)
        self._before: dict[str, dict[str, float]] = {}

    def step(self, step: int) -> None:
        """Forward, backward and the optimizer; seed and step decide batch and dropout masks."""
        if step == SETTLING:
            self._before = self._totals()
        for group in self.optimizer.param_groups:
            group["lr"] = self.task.lr(step)
        self.optimizer.zero_grad()
        self.run.losses.append(gradients(self.model, self.task, self.seed, step))
        self.optimizer.step()

    def finish(self) -> Run:
        """Validate, take the statistics, and uninstall."""
        self.run.validation_loss, self.run.accuracy = validate(self.model, self.task)
        if self.handle is not None:
            self.handle.engine.synchronize()
            steps, before = len(self.run.losses) - SETTLING, self._before
            for codec, now in self._totals().items():
                then = before.get(codec, {})
                per_step = {key: (v - then.get(key, 0.0)) / steps for key, v in now.items()}
                self.run.by_codec[codec] = per_step
            sizes = [e.nbytes for e in self.handle.engine.explain()]
            self.run.eligible_bytes = float(sum(filter(None, sizes)))
            saved = sum(c["raw"] - c["encoded"] for c in self.run.by_codec.values())
            self.run.held_bytes = self.run.eligible_bytes - saved
            self.handle.remove()
        return self.run

    def _totals(self) -> dict[str, dict[str, float]]:
        if self.handle is None:
            return {}
        stats = self.handle.stats.by_codec
        return {
            codec: {"raw": float(c.raw), "encoded": float(c.encoded)} for codec, c in stats.items()
        }


def gradients(model: nn.Module, task: Task, seed: int, step: int) -> float:
    """One forward and backward; the loss."""
    inputs, targets = task.batch(seed, step)
    torch.manual_seed(seed * 1_000_003 + step)
    loss = task.loss(model(inputs), targets)
    loss.backward()
    return float(loss.detach())


def validate(model: nn.Module, task: Task) -> tuple[float, float]:
    """Mean loss, of cross entropy in nats, and accuracy on held-out data."""
    model.eval()
    loss, hits, n = 0.0, 0, 0
    with torch.no_grad():
        for inputs, targets in task.validation:
            outputs = model(inputs)
            loss += float(task.loss(outputs, targets)) * targets.numel()
            hits += int(task.right(outputs, targets).sum())
            n += targets.numel()
    model.train()
    return loss / n, hits / n


def train(
    task: Task,
    policies: Sequence[str],
    seed: int,
    on_step: Callable[[], object],
) -> Mapping[str, Trained]:
    """Train under all policies in turns. Call `finish` on each of the trained models.

    Args:
        task: data, model and schedule.
        policies: names of `POLICIES`; the first is "off".
        seed: seed of weights, batches and dropout masks.
        on_step: called after each step of all policies.
    """
    replicas = {policy: Trained(task, policy, seed) for policy in policies}
    off = replicas[policies[0]]
    for step in range(task.n_steps):
        for replica in replicas.values():
            replica.step(step)
            replica.run.same_bits &= _same(replica, off)
        on_step()
    return replicas


@contextmanager
def repeatable() -> Iterator[None]:
    """A context in which figures do not depend on the load of the machine.

    The advisor then does not correct its estimates by measured times. A tensor that backward wants
    before its lossy encode has ended gets the codec's values all the same.
    """
    # torch defines the flag in a way that its types do not show.
    before = (
        torch.are_deterministic_algorithms_enabled(),
        torch.is_deterministic_algorithms_warn_only_enabled(),
        torch.utils.deterministic.fill_uninitialized_memory,  # type: ignore[attr-defined]
    )
    torch.use_deterministic_algorithms(True)
    # Filling fresh memory costs time, and nothing reads it.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])
        torch.utils.deterministic.fill_uninitialized_memory = before[2]  # type: ignore[attr-defined]


def _same(mine: Trained, its: Trained) -> bool:
    if mine.run.losses[-1] != its.run.losses[-1]:
        return False
    return all(
        torch.equal(_bytes(a), _bytes(b))
        for a, b in zip(mine.model.parameters(), its.model.parameters(), strict=True)
    )


def _bytes(parameter: Tensor) -> Tensor:
    return parameter.detach().reshape(-1).view(torch.uint8)
