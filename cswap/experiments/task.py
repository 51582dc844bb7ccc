"""The seam to a model of one's own: a `Task` is all that the accuracy experiment trains."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from torch.optim import Optimizer

Batch = tuple[Tensor, Tensor]


def class_is_right(logits: Tensor, targets: Tensor) -> Tensor:
    """Whether the largest logit of dimension 1 is the target's; bool, of the targets' shape."""
    return logits.argmax(1) == targets


@dataclass(frozen=True, slots=True)
class Task:
    """One model to train.

    Attributes:
        name: of the model, for tables and files.
        n_steps: training steps.
        peak_lr: learning rate after the warm-up.
        build: makes the model from torch's global random state; a step calls ``model(inputs)``.
        optimizer: makes its optimizer. The experiment sets the learning rate of each step.
        batch: (seed, step) -> inputs and targets; the same ones in every call.
        validation: fixed batches that are never trained on.
        facts: sizes and data, for the report.
        margin: increase of the mean validation loss that would not matter, stated before the runs;
            None: none is stated.
        loss: (outputs, targets) -> the loss, a mean.
        right: (outputs, targets) -> whether each output counts as right, for the accuracy; bool,
            of the targets' shape.
    """

    name: str
    n_steps: int
    peak_lr: float
    build: Callable[[], Any]
    optimizer: Callable[[Any], Optimizer]
    batch: Callable[[int, int], Batch]
    validation: Sequence[Batch]
    facts: dict[str, object] = field(default_factory=dict)
    margin: float | None = None
    loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    right: Callable[[Tensor, Tensor], Tensor] = class_is_right

    def lr(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
        n_warm = max(1, self.n_steps // 10)
        if step < n_warm:
            return self.peak_lr * (step + 1) / n_warm
        done = (step - n_warm) / max(1, self.n_steps - n_warm)
        return self.peak_lr * (0.55 + 0.45 * math.cos(math.pi * done))
