"""`Workload`: a model and its training data; and models that return their loss.

A builder makes a `Workload` of a `Scale`; it raises ImportError where its package is missing.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn
from torch.nn import functional

if TYPE_CHECKING:
    from collections.abc import Callable

    from torch import Tensor

Batch = dict[str, Any]

VOCABULARY: Final = 4096
N_CLASSES: Final = 10


@dataclass(frozen=True, slots=True)
class Scale:
    """Sizes of a run.

    Attributes:
        layers: of transformers.
        width: of transformers, a multiple of 32.
        tokens: of a sequence.
        batch: sequences, pictures.
        side: of pictures, in pixels; a multiple of 32.
        nodes: of a graph.
    """

    layers: int
    width: int
    tokens: int
    batch: int
    side: int
    nodes: int


FULL: Final = Scale(layers=4, width=256, tokens=256, batch=8, side=160, nodes=20_000)
QUICK: Final = Scale(layers=2, width=64, tokens=64, batch=4, side=64, nodes=1_000)


@dataclass(frozen=True, slots=True)
class Workload:
    """A model and its training data.

    Attributes:
        model: takes a batch's entries by name and returns the loss.
        batch: of a step, by the step's number.
        recompute: switches the package's own gradient checkpointing on.
    """

    model: nn.Module
    batch: Callable[[int], Batch]
    recompute: Callable[[], object]


class WithLoss(nn.Module):
    """A model whose loss is the cross entropy, or another one, of its result."""

    def __init__(
        self, net: nn.Module, loss: Callable[[Tensor, Tensor], Tensor] = functional.cross_entropy
    ) -> None:
        super().__init__()
        self.net, self.loss = net, loss

    def forward(self, target: Tensor, **inputs: Any) -> Tensor:
        """The loss of the net's output, or of its ``.sample``."""
        found = self.net(*inputs.values())
        return self.loss(getattr(found, "sample", found), target)


class OwnLoss(nn.Module):
    """A model of transformers: it returns its loss itself."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, **inputs: Any) -> Tensor:
        """The loss."""
        loss: Tensor = self.net(**inputs).loss
        return loss


def generator(step: int) -> torch.Generator:
    """Of a step's random data."""
    return torch.Generator().manual_seed(step)
