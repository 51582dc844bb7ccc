"""A model and a training loop of one's own. Run it with ``python own_loop.py``."""

from __future__ import annotations

import torch
from torch import nn

import cswap

torch.manual_seed(0)
model = nn.Sequential(
    nn.Linear(256, 1024), nn.ReLU(), nn.Linear(1024, 1024), nn.ReLU(), nn.Linear(1024, 10)
)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
data = [(torch.randn(512, 256), torch.randint(10, (512,))) for _ in range(4)]

with cswap.install(model) as handle:  # the one line
    for epoch in range(3):
        for x, y in data:
            loss = nn.functional.cross_entropy(model(x), y)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        print(f"epoch {epoch}: loss {loss.item():.3f}")

print(handle.stats)
print(handle.engine.explain()[0])  # the decision for the first saved tensor, with its reason
