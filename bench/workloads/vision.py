"""Two more models on images: a small vision transformer, and an MLP with squared ReLU."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional

from bench.workloads.small_models import Block, GptShape, Net


@dataclass(frozen=True, slots=True)
class VitShape:
    """Sizes of `Vit`.

    Attributes:
        n_layers: transformer blocks.
        width: embedding width in elements.
        n_heads: attention heads; width must be a multiple.
        patch: height and width of a patch in pixels.
        side: height and width of the input in pixels, a multiple of patch.
        dropout: share of activations dropped before each addition to the residual stream.
    """

    n_layers: int = 4
    width: int = 96
    n_heads: int = 4
    patch: int = 4
    side: int = 32
    dropout: float = 0.1


class Vit(Net):
    """Vision transformer (Dosovitskiy et al. 2020), scaled down; mean over patches, no token."""

    def __init__(self, shape: VitShape) -> None:
        super().__init__()
        self.embed = nn.Conv2d(1, shape.width, shape.patch, shape.patch)
        n = (shape.side // shape.patch) ** 2
        self.position = nn.Parameter(0.02 * torch.randn(n, shape.width))
        block = GptShape(width=shape.width, n_heads=shape.n_heads, dropout=shape.dropout)
        self.blocks = nn.ModuleList(Block(block, causal=False) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, 10], of images, [batch, 1, side, side]."""
        with self.probe():
            x = self.embed(images).flatten(2).transpose(1, 2) + self.position
            for block in self.blocks:
                x = self.run_block(block, x)
            logits: Tensor = self.head(self.norm(x).mean(1))
            return logits


class SquaredReluBlock(nn.Module):
    """x + W relu(V norm(x))**2 (So et al., Primer, 2021): half of its saved values are zero."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; x and result are [batch, width]."""
        out: Tensor = x + self.down(functional.relu(self.up(self.norm(x))).square())
        return out


class SquaredReluMlp(Net):
    """Residual MLP on flattened images."""

    def __init__(self, width: int = 256, n_blocks: int = 4, side: int = 32) -> None:
        super().__init__()
        self.embed = nn.Linear(side * side, width)
        self.blocks = nn.ModuleList(SquaredReluBlock(width) for _ in range(n_blocks))
        self.head = nn.Linear(width, 10)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, 10], of images, [batch, 1, side, side]."""
        with self.probe():
            x = self.embed(images.flatten(1))
            for block in self.blocks:
                x = self.run_block(block, x)
            logits: Tensor = self.head(x)
            return logits
