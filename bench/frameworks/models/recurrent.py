"""A recurrent language model of torch's own layers: LSTM."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from bench.frameworks.models.workload import VOCABULARY, Batch, Scale, WithLoss, Workload, generator


class _Lstm(nn.Module):
    """Embedding, LSTM layers with dropout, and scores of the next token."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.lstm = nn.LSTM(width, width, layers, batch_first=True, dropout=0.2)
        self.head = nn.Linear(width, VOCABULARY)
        self.checkpointed = False

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Scores [sequences, VOCABULARY, tokens]. Args: tokens: [sequences, tokens]."""
        x = self.embedding(tokens)
        if self.checkpointed:
            x, _ = checkpoint(self.lstm, x, use_reentrant=False)
        else:
            x, _ = self.lstm(x)
        scores: torch.Tensor = self.head(x).transpose(1, 2)
        return scores

    def recompute(self) -> None:
        self.checkpointed = True


def lstm(scale: Scale) -> Workload:
    """A language model of an LSTM."""
    net = _Lstm(scale.width, scale.layers)

    def batch(step: int) -> Batch:
        shape = (scale.batch, scale.tokens)
        tokens = torch.randint(VOCABULARY, shape, generator=generator(step))
        return {"target": tokens.roll(-1, dims=1), "tokens": tokens}

    return Workload(WithLoss(net), batch, net.recompute)
