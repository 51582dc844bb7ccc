"""SwapAdvisor's RNN-L-H: LSTM layers unrolled over the time steps, in elementary operators."""

from __future__ import annotations

import torch
from torch import nn


class LstmCell(nn.Module):
    """One LSTM step in elementary operators (Hochreiter & Schmidhuber 1997, with a forget gate)."""

    def __init__(self, width_in: int, width: int) -> None:
        super().__init__()
        self.from_input = nn.Linear(width_in, 4 * width)
        self.from_hidden = nn.Linear(width, 4 * width)

    def forward(
        self, x: torch.Tensor, hidden: torch.Tensor, cell: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """x [batch, width_in], hidden and cell [batch, width] to the next hidden and cell."""
        gates = self.from_input(x) + self.from_hidden(hidden)
        enter, forget, new, leave = gates.chunk(4, 1)
        cell = forget.sigmoid() * cell + enter.sigmoid() * new.tanh()
        return leave.sigmoid() * cell.tanh(), cell


class Rnn(nn.Module):
    """LSTM layers of one width, and a linear layer on the last one's last step."""

    def __init__(self, n_layers: int, width: int, width_in: int, num_classes: int) -> None:
        super().__init__()
        self.width = width
        self.cells = nn.ModuleList(
            LstmCell(width if layer else width_in, width) for layer in range(n_layers)
        )
        self.head = nn.Linear(width, num_classes)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of x, [batch, time, width_in]."""
        steps = list(x.unbind(1))
        for layer in self.cells:
            hidden = x.new_zeros(x.shape[0], self.width)
            cell = x.new_zeros(x.shape[0], self.width)
            for time, step in enumerate(steps):
                hidden, cell = layer(step, hidden, cell)
                steps[time] = hidden
        logits: torch.Tensor = self.head(steps[-1])
        return logits


def rnn(n_layers: int = 8, width: int = 8192, width_in: int = 1024, num_classes: int = 1024) -> Rnn:
    """RNN-8-8K by default.

    SwapAdvisor states layers and width only; the widths of input and output are our reading.
    """
    return Rnn(n_layers, width, width_in, num_classes)
