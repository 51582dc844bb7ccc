"""A recommender of rows of tables, written by hand: DLRM."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import torch
from torch import nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from bench.frameworks.models.workload import Batch, Scale, WithLoss, Workload, generator

if TYPE_CHECKING:
    from torch import Tensor

N_TABLES: Final = 26
"""Of categories, as in Criteo's data."""
N_NUMBERS: Final = 13
"""Of an example, as there."""
ROWS: Final = 2000
"""Of a table."""


class _Dlrm(nn.Module):
    """Products of all pairs of embedding bags and an MLP's result, and an MLP on them."""

    pairs: Tensor

    def __init__(self, width: int) -> None:
        super().__init__()
        bags = (nn.EmbeddingBag(ROWS, width, mode="sum") for _ in range(N_TABLES))
        self.bags = nn.ModuleList(bags)
        self.bottom = nn.Sequential(
            nn.Linear(N_NUMBERS, 8 * width), nn.ReLU(), nn.Linear(8 * width, width), nn.ReLU()
        )
        n_pairs = (N_TABLES + 1) * N_TABLES // 2
        self.top = nn.Sequential(
            nn.Linear(n_pairs + width, 8 * width), nn.ReLU(), nn.Linear(8 * width, 1)
        )
        self.register_buffer("pairs", torch.tril_indices(N_TABLES + 1, N_TABLES + 1, -1))
        self.checkpointed = False

    def forward(self, numbers: Tensor, categories: Tensor) -> Tensor:
        """Scores [n]. Args: numbers: [n, N_NUMBERS]; categories: [N_TABLES, n]."""
        if self.checkpointed:
            found: Tensor = checkpoint(self._scores, numbers, categories, use_reentrant=False)
            return found
        return self._scores(numbers, categories)

    def _scores(self, numbers: Tensor, categories: Tensor) -> Tensor:
        dense = self.bottom(numbers)
        offsets = torch.arange(len(numbers))
        rows = [bag(its, offsets) for bag, its in zip(self.bags, categories, strict=True)]
        together = torch.stack([dense, *rows], dim=1)
        products = torch.bmm(together, together.transpose(1, 2))
        first, second = self.pairs
        scores: Tensor = self.top(torch.cat([dense, products[:, first, second]], dim=1))
        return scores.squeeze(1)

    def recompute(self) -> None:
        self.checkpointed = True


def dlrm(scale: Scale) -> Workload:
    """DLRM: whether somebody clicks."""
    net, n_examples = _Dlrm(scale.width // 4), scale.nodes // 2

    def batch(step: int) -> Batch:
        of_step = generator(step)
        clicks = torch.randint(2, (n_examples,), generator=of_step).float()
        numbers = torch.randn(n_examples, N_NUMBERS, generator=of_step)
        categories = torch.randint(ROWS, (N_TABLES, n_examples), generator=of_step)
        return {"target": clicks, "numbers": numbers, "categories": categories}

    model = WithLoss(net, functional.binary_cross_entropy_with_logits)
    return Workload(model, batch, net.recompute)
