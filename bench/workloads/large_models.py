"""The published models that training is measured on, in blocks that can be checkpointed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from cswap.experiments.workloads.small_models import Block, Dropout, GptShape

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

VGG_STAGES: Final = ((64, 64), (128, 128), (256, 256, 256), (512, 512, 512), (512, 512, 512))
RESNET_STAGES: Final = ((64, 3), (128, 4), (256, 6), (512, 3))
"""Width of the bottlenecks, and how many."""

VOCABULARY: Final = 50257


class BlockModel(nn.Module):
    """A model whose blocks can be checkpointed.

    Attributes:
        checkpointed: recompute each block in backward instead of saving its tensors.
        around_checkpoint: entered around every checkpointed block, where it saves its inputs.
    """

    def __init__(self) -> None:
        super().__init__()
        self.checkpointed = False
        self.around_checkpoint: Callable[[], AbstractContextManager[object]] = nullcontext

    def run_block(self, block: nn.Module, x: Tensor) -> Tensor:
        """Run one block, under torch's non-reentrant checkpoint if the model is checkpointed."""
        out: Tensor
        if self.checkpointed:
            with self.around_checkpoint():
                out = checkpoint(block, x, use_reentrant=False)
        else:
            out = block(x)
        return out


class Vgg16(BlockModel):
    """VGG, configuration D.

    Source: Simonyan & Zisserman 2014, "Very Deep Convolutional Networks", table 1.
    """

    def __init__(self, n_classes: int = 1000) -> None:
        super().__init__()
        self.stages = nn.ModuleList()
        c_in = 3
        for stage in VGG_STAGES:
            layers: list[nn.Module] = []
            for c_out in stage:
                layers += [nn.Conv2d(c_in, c_out, 3, padding=1), nn.ReLU()]
                c_in = c_out
            self.stages.append(nn.Sequential(*layers, nn.MaxPool2d(2)))
        self.classifier = nn.Sequential(
            nn.Flatten(),
            *(nn.Linear(512 * 7 * 7, 4096), nn.ReLU(), nn.Dropout()),
            *(nn.Linear(4096, 4096), nn.ReLU(), nn.Dropout()),
            nn.Linear(4096, n_classes),
        )

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, n_classes], of images, [batch, 3, 224, 224]."""
        x = images
        for stage in self.stages:
            x = self.run_block(stage, x)
        out: Tensor = self.classifier(x)
        return out


class Bottleneck(nn.Module):
    """1x1, 3x3 and 1x1 convolutions with a shortcut around them."""

    def __init__(self, c_in: int, width: int, stride: int) -> None:
        super().__init__()
        c_out = 4 * width
        self.body = nn.Sequential(
            *(nn.Conv2d(c_in, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU()),
            *(nn.Conv2d(width, c_out, 1, bias=False), nn.BatchNorm2d(c_out)),
        )
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or c_in != c_out:
            self.shortcut = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out)
            )
        self.relu = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        """Return [batch, 4 width, h, w] of x, [batch, c_in, h, w] before the stride."""
        out: Tensor = self.relu(self.body(x) + self.shortcut(x))
        return out


class ResNet50(BlockModel):
    """ResNet-50 with the stride in the 3x3 convolution, as torchvision has it.

    Source: He et al. 2015, "Deep Residual Learning for Image Recognition", table 1.
    """

    def __init__(self, n_classes: int = 1000) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, 64, 7, 2, padding=3, bias=False),
            *(nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)),
        )
        self.blocks = nn.ModuleList()
        c_in = 64
        for index, (width, n_blocks) in enumerate(RESNET_STAGES):
            for i in range(n_blocks):
                stride = 2 if i == 0 and index > 0 else 1
                self.blocks.append(Bottleneck(c_in, width, stride))
                c_in = 4 * width
        self.head = nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(c_in, n_classes))

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, n_classes], of images, [batch, 3, 224, 224]."""
        x = self.stem(images)
        for block in self.blocks:
            x = self.run_block(block, x)
        out: Tensor = self.head(x)
        return out


class Gpt2(BlockModel):
    """GPT-2 with its head tied to the embedding.

    Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners".
    """

    def __init__(self, shape: GptShape, vocabulary: int = VOCABULARY) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, shape.width)
        self.position = nn.Embedding(shape.context, shape.width)
        self.dropout = Dropout(shape.dropout)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.n_layers))
        self.norm = nn.LayerNorm(shape.width)
        self.head = nn.Linear(shape.width, vocabulary, bias=False)
        nn.init.normal_(self.token.weight, std=0.02)
        nn.init.normal_(self.position.weight, std=0.01)
        self.head.weight = self.token.weight

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, vocabulary, time], of tokens, [batch, time] int64."""
        places = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.dropout(self.token(tokens) + self.position(places))
        for block in self.blocks:
            x = self.run_block(block, x)
        out: Tensor = self.head(self.norm(x)).transpose(1, 2)
        return out


def gpt_shape(n_layers: int, width: int, n_heads: int) -> GptShape:
    """A GPT-2 with 1024 tokens of context."""
    return GptShape(n_layers, width, n_heads, context=1024)


GPT2_SMALL: Final = gpt_shape(12, 768, 12)
GPT2_MEDIUM: Final = gpt_shape(24, 1024, 16)
GPT2_LARGE: Final = gpt_shape(36, 1280, 20)
GPT_1_3B: Final = gpt_shape(24, 2048, 16)
"""Layers and width of GPT-3 XL; its heads would not divide the width."""


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())
