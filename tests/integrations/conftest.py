"""A small model of its own for every trainer, and what its gradients are without cswap."""

from __future__ import annotations

import pytest
import torch
from torch import nn


class Network(nn.Module):
    """Takes and returns what a Trainer of transformers passes on."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(
            nn.Linear(32, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 4)
        )

    def forward(self, x, labels=None):
        logits = self.layers(x)
        if labels is None:
            return {"logits": logits}
        return {"loss": nn.functional.cross_entropy(logits, labels), "logits": logits}


class Rows(torch.utils.data.Dataset[dict[str, torch.Tensor]]):
    """Examples as dicts; the one at ``broken`` raises."""

    def __init__(self, n=256, broken=None) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(n, 32, generator=generator)
        self.labels = torch.randint(4, (n,), generator=generator)
        self.broken = broken

    def __len__(self):
        return len(self.x)

    def __getitem__(self, i):
        if i == self.broken:
            raise RuntimeError("broken example")
        return {"x": self.x[i], "labels": self.labels[i]}


@pytest.fixture
def network():
    """Makes models with the same weights each time."""
    return Network


@pytest.fixture
def rows():
    """Makes data sets."""
    return Rows


@pytest.fixture
def untouched():
    """Says whether nothing of cswap is left on a model."""

    def look(model):
        own = {name for name in model.__dict__ if name in ("forward", "training_step")}
        hooked = any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())
        return not own and not hooked

    return look
