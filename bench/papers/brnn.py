"""SwapAdvisor's BRNN-L-H: bidirectional LSTM layers, unrolled, in elementary operators."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from bench.workloads.zoo.catalogue import RNN_STEPS, RNN_WIDTH_IN
from bench.workloads.zoo.rnn import LstmCell

if TYPE_CHECKING:
    from collections.abc import Iterable

N_LAYERS: Final = 4
WIDTH: Final = 8192


class Brnn(nn.Module):
    """LSTM layers in both directions, their outputs side by side; a linear layer on the last ones.

    SwapAdvisor states layers and width only. The widths of input and output, the number of steps
    and that a layer reads both directions of the one before are our reading.
    """

    def __init__(self, n_layers: int, width: int, width_in: int, num_classes: int) -> None:
        super().__init__()
        self.width = width
        sizes = [2 * width if layer else width_in for layer in range(n_layers)]
        self.onward = nn.ModuleList(LstmCell(size, width) for size in sizes)
        self.reverse = nn.ModuleList(LstmCell(size, width) for size in sizes)
        self.head = nn.Linear(2 * width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of x, [batch, time, width_in]."""
        steps = list(x.unbind(1))
        for onward, back in zip(self.onward, self.reverse, strict=True):
            first = self._run(onward, steps)
            second = self._run(back, reversed(steps))[::-1]
            steps = [torch.cat(pair, 1) for pair in zip(first, second, strict=True)]
        logits: torch.Tensor = self.head(steps[-1])
        return logits

    def _run(self, cell: nn.Module, steps: Iterable[torch.Tensor]) -> list[torch.Tensor]:
        hidden = state = None
        found = []
        for step in steps:
            if hidden is None:
                hidden = state = step.new_zeros(step.shape[0], self.width)
            hidden, state = cell(step, hidden, state)
            found.append(hidden)
        return found


def brnn() -> Brnn:
    """BRNN-4-8K on the meta device."""
    with torch.device("meta"):
        return Brnn(N_LAYERS, WIDTH, RNN_WIDTH_IN, RNN_WIDTH_IN)


def example(batch: int) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch and its target, on the meta device."""
    with torch.device("meta"):
        return torch.empty(batch, RNN_STEPS, RNN_WIDTH_IN), torch.empty(batch, dtype=torch.int64)
