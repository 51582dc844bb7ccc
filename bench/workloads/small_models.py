"""The demo's two models: a VGG-style ReLU network and a small pre-norm GPT.

Both call their blocks through `run_block`, so that one flag turns torch's checkpointing on without
a second model, and both enter `probe` around their forward pass, so that a measurement sits inside
whatever hooks a mode has installed.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

Probe = Callable[[], AbstractContextManager[object]]


class Net(nn.Module):
    """A model of blocks that can be checkpointed and probed.

    Attributes:
        checkpointed: recompute each block in backward instead of saving its tensors.
        around_checkpoint: entered around every checkpointed block, where it saves its inputs.
        probe: entered around every forward pass and every recomputation.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checkpointed = False
        self.around_checkpoint: Probe = nullcontext
        self.probe: Probe = nullcontext

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block, under torch's non-reentrant checkpoint if the model is checkpointed."""
        out: Tensor
        if self.checkpointed and torch.is_grad_enabled():
            # The probe again: the code around the checkpoint has put its hooks before those of the
            # forward's probe.
            with self.around_checkpoint(), self.probe():
                out = checkpoint(block, x, use_reentrant=False, context_fn=self._contexts)
        else:
            out = block(x)
        return out

    def _contexts(self) -> tuple[AbstractContextManager[object], AbstractContextManager[object]]:
        # for a block's first pass, where forward has entered the probe already, and its second
        return nullcontext(), self.probe()


class Dropout(nn.Module):
    """Dropout that saves a bool mask, as nn.Dropout does on CUDA; on a CPU that saves floats."""

    def __init__(self, share: float) -> None:
        super().__init__()
        self.share = share

    def forward(self, x: Tensor) -> Tensor:
        """Zero a share of x and scale the rest while training; return x itself otherwise."""
        if not self.training:
            return x
        out: Tensor = torch.native_dropout(x, self.share, True)[0]
        return out


@dataclass(frozen=True, slots=True)
class CnnShape:
    """Sizes of `VggNet`.

    Attributes:
        channels: channels of each stage: two convolutions, then a pooling that halves the image.
        side: height and width of the input in pixels, at least 2 to the number of stages.
        dropout: share of activations dropped after each stage and in the classifier.
    """

    channels: tuple[int, ...] = (16, 32, 64)
    side: int = 32
    dropout: float = 0.25


class VggNet(Net):
    """VGG (Simonyan & Zisserman 2014, configuration B), scaled down."""

    def __init__(self, shape: CnnShape) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        c_in = 1
        for c_out in shape.channels:
            self.stages.append(_vgg_stage(c_in, c_out, shape.dropout))
            c_in = c_out
        side = shape.side >> len(shape.channels)
        self.classifier = nn.Sequential(
            nn.Flatten(),
            nn.Linear(c_in * side * side, 128),
            nn.ReLU(),
            Dropout(shape.dropout),
            nn.Linear(128, 10),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, 10], of images, [batch, 1, side, side]."""
        with self.probe():
            x = images
            for stage in self.stages:
                x = self.run_block(stage, x)
            logits: Tensor = self.classifier(x)
            return logits


def _vgg_stage(c_in: int, c_out: int, dropout: float) -> nn.Sequential:
    first, second = nn.Conv2d(c_in, c_out, 3, padding=1), nn.Conv2d(c_out, c_out, 3, padding=1)
    for conv in (first, second):
        # He initialisation: without batch norm the default one lets six ReLU layers fade out
        nn.init.kaiming_normal_(conv.weight, nonlinearity="relu")
        if conv.bias is not None:
            nn.init.zeros_(conv.bias)
    return nn.Sequential(first, nn.ReLU(), second, nn.ReLU(), nn.MaxPool2d(2), Dropout(dropout))


@dataclass(frozen=True, slots=True)
class GptShape:
    """Sizes of `Gpt`.

    Attributes:
        n_layers: transformer blocks.
        width: embedding width in elements.
        n_heads: attention heads; width must be a multiple.
        context: bytes the model sees at once.
        dropout: share of activations dropped before each addition to the residual stream, as in
            GPT-2.
    """

    n_layers: int = 4
    width: int = 128
    n_heads: int = 4
    context: int = 128
    dropout: float = 0.1


class Block(nn.Module):
    """One pre-norm transformer block: x + attention(norm(x)), then x + mlp(norm(x)).

    Args:
        shape: its width, heads and dropout.
        causal: whether a position sees only those before it.
    """

    def __init__(self, shape: GptShape, *, causal: bool = True) -> None:
        super().__init__()
        self.n_heads, self.causal = shape.n_heads, causal
        self.norm_attention = nn.LayerNorm(shape.width)
        self.qkv = nn.Linear(shape.width, 3 * shape.width)
        self.out = nn.Sequential(nn.Linear(shape.width, shape.width), Dropout(shape.dropout))
        self.norm_mlp = nn.LayerNorm(shape.width)
        self.mlp = nn.Sequential(
            nn.Linear(shape.width, 4 * shape.width),
            nn.GELU(),
            nn.Linear(4 * shape.width, shape.width),
            Dropout(shape.dropout),
        )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output; x and result are [batch, time, width]."""
        x = x + self.attend(self.norm_attention(x))
        x = x + self.mlp(self.norm_mlp(x))
        return x  # noqa: RET504 - two like lines; and the sum is typed Any

    def attend(self, x: Tensor) -> Tensor:
        """Self-attention; x and result are [batch, time, width]."""
        batch, time, width = x.shape
        heads = self.qkv(x).view(batch, time, 3, self.n_heads, width // self.n_heads)
        q, k, v = heads.permute(2, 0, 3, 1, 4)  # each [batch, head, time, width / n_heads]
        mixed = functional.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        out: Tensor = self.out(mixed.transpose(1, 2).reshape(batch, time, width))
        return out


class Gpt(Net):
    """A byte-level GPT (vocabulary 256) with learned positions."""

    def __init__(self, shape: GptShape) -> None:
        super().__init__()
        self.token = nn.Embedding(256, shape.width)
        self.position = nn.Parameter(torch.zeros(shape.context, shape.width))
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, 256, bias=False)
        # wider than GPT-2's 0.02: within the demo's few steps that gets much further
        nn.init.normal_(self.token.weight, std=0.5)
        nn.init.normal_(self.position, std=0.25)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, 256, time], of tokens, [batch, time] int64."""
        with self.probe():
            x = self.dropout(self.token(tokens) + self.position[: tokens.shape[1]])
            for block in self.blocks:
                x = self.run_block(block, x)
            logits: Tensor = self.head(self.norm(x)).transpose(1, 2)
            return logits
