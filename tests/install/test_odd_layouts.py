"""Models that save sparse and nested tensors: these stay, and gradients keep their bits."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

import cswap

STEPS = 20


class Graph(nn.Module):
    """Two layers of a graph network; its adjacency is a sparse COO tensor."""

    def __init__(self):
        super().__init__()
        eye = torch.eye(64)
        self.register_buffer("adjacency", (eye + eye.roll(1, 0)).to_sparse())
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        x = torch.sparse.mm(self.adjacency, self.first(x).relu())
        return torch.sparse.mm(self.adjacency, self.second(x))


class Nested(nn.Module):
    """Linear layers of a batch of sequences of several lengths."""

    def __init__(self, layout):
        super().__init__()
        self.layout = layout
        self.first, self.second = nn.Linear(64, 64), nn.Linear(64, 8)

    def forward(self, x):
        rows = [x[: 20 + len(x) % 7], x[3:]]
        found = self.second(self.first(torch.nested.nested_tensor(rows, layout=self.layout)).relu())
        return found.to_padded_tensor(0.0) if self.layout is torch.strided else found.values()


class Padded(nn.Module):
    """A frozen encoder with a mask: torch's fast path makes nested tensors inside of it."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2).requires_grad_(False).eval()
        self.head = nn.Linear(64, 8)

    def forward(self, x):
        x = x.view(4, -1, 64)
        mask = torch.zeros(x.shape[:2], dtype=torch.bool)
        mask[:, -2:] = True
        return self.head(self.encoder(x, src_key_padding_mask=mask))


MODELS = {
    "sparse": Graph,
    "nested, strided": lambda: Nested(torch.strided),
    "nested, jagged": lambda: Nested(torch.jagged),
    "frozen encoder": Padded,
}


def gradients(model, n):
    model.zero_grad()
    x = torch.randn(64, 64, generator=torch.Generator().manual_seed(n))
    model(x).square().mean().backward()
    return [p.grad.clone() for p in model.parameters() if p.grad is not None]


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("name", MODELS)
def test_layouts_that_have_no_bytes_or_sizes_stay(name):
    torch.manual_seed(0)
    plain = MODELS[name]()
    for options in ({}, {"min_bytes": 0, "slowdown": 10.0}, {"codec": "raw", "min_bytes": 0}):
        model = copy.deepcopy(plain)
        with cswap.install(model, **options):
            for n in range(STEPS):
                wanted = gradients(plain, n)
                for one, other in zip(gradients(model, n), wanted, strict=True):
                    assert torch.equal(one, other)
