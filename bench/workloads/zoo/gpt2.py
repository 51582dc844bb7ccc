"""GPT-2 (Radford et al. 2019) in its four sizes."""

from __future__ import annotations

import torch
from torch import nn
from torch.nn import functional

VOCABULARY = 50257
CONTEXT = 1024


class Block(nn.Module):
    """x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.n_heads = n_heads
        self.norm_attention = nn.LayerNorm(width)
        self.qkv = nn.Linear(width, 3 * width)
        self.out = nn.Sequential(nn.Linear(width, width), nn.Dropout(dropout))
        self.norm_mlp = nn.LayerNorm(width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width),
            nn.GELU(approximate="tanh"),
            nn.Linear(4 * width, width),
            nn.Dropout(dropout),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x and the result are [batch, time, width]."""
        x = x + self.attend(self.norm_attention(x))
        out: torch.Tensor = x + self.mlp(self.norm_mlp(x))
        return out

    def attend(self, x: torch.Tensor) -> torch.Tensor:
        """Causal self-attention; x and the result are [batch, time, width]."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.n_heads, width // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width / n_heads]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: torch.Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Gpt2(nn.Module):
    """Learned positions; the output layer is the token embedding again."""

    def __init__(self, n_layers: int, width: int, n_heads: int, dropout: float) -> None:
        super().__init__()
        self.token = nn.Embedding(VOCABULARY, width)
        self.position = nn.Embedding(CONTEXT, width)
        self.dropout = nn.Dropout(dropout)
        self.blocks = nn.Sequential(*(Block(width, n_heads, dropout) for _ in range(n_layers)))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.token.weight

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, time, 50257], of tokens, [batch, time] int64."""
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(positions))
        logits: torch.Tensor = self.head(self.norm(self.blocks(x)))
        return logits


_SIZES = {
    "small": (12, 768, 12),
    "medium": (24, 1024, 16),
    "large": (36, 1280, 20),
    "xl": (48, 1600, 25),
}


def gpt2(size: str = "small", dropout: float = 0.1) -> Gpt2:
    """GPT-2; size: small, medium, large or xl."""
    return Gpt2(*_SIZES[size], dropout)
