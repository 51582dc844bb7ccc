"""Inception-v3 (Szegedy et al., arXiv:1512.00567), for HOME's table of largest batches.

Widths are those of torchvision's model without the auxiliary classifier. For small images the stem
has stride 1 and no pooling, as is usual for CIFAR.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

import torch
from torch import nn

from bench.workloads.zoo.layers import SMALL_SIDE, Relu, activation

if TYPE_CHECKING:
    from collections.abc import Sequence

Size: TypeAlias = int | tuple[int, int]


class Branches(nn.Module):
    """Modules over one input, their channels put side by side."""

    def __init__(self, branches: Sequence[nn.Module]) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, c_in, h, w] to [batch, c_out, h', w']."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class Blocks:
    """The network's blocks, all with one kind of activation."""

    def __init__(self, relu: Relu) -> None:
        self._relu = relu

    def conv(
        self, c_in: int, c_out: int, kernel: Size, stride: int = 1, padding: Size = 0
    ) -> nn.Sequential:
        """A convolution, its batch norm and the activation."""
        conv = nn.Conv2d(c_in, c_out, kernel, stride, padding, bias=False)
        return nn.Sequential(conv, nn.BatchNorm2d(c_out, eps=1e-3), activation(self._relu))

    def stem(self, side: int) -> list[nn.Module]:
        """3 to 192 channels; for small images without strides and pooling."""
        small = side <= SMALL_SIDE
        first = self.conv(3, 32, 3, 1, 1) if small else self.conv(3, 32, 3, 2)
        pool: list[nn.Module] = [] if small else [nn.MaxPool2d(3, 2)]
        second = [self.conv(32, 32, 3, 1, int(small)), self.conv(32, 64, 3, 1, 1)]
        return [first, *second, *pool, self.conv(64, 80, 1), self.conv(80, 192, 3), *pool]

    def wide(self, c_in: int, c_pool: int) -> Branches:
        """Figure 5: 1x1, 5x5, two 3x3, pooling; c_in to 224 + c_pool channels."""
        five = [self.conv(c_in, 48, 1), self.conv(48, 64, 5, 1, 2)]
        three = [self.conv(c_in, 64, 1), self.conv(64, 96, 3, 1, 1), self.conv(96, 96, 3, 1, 1)]
        return Branches(
            [self.conv(c_in, 64, 1), _chain(five), _chain(three), self._pooled(c_in, c_pool)]
        )

    def first_reduction(self, c_in: int) -> Branches:
        """Figure 10, to half the size; c_in to c_in + 480 channels."""
        three = [self.conv(c_in, 64, 1), self.conv(64, 96, 3, 1, 1), self.conv(96, 96, 3, 2)]
        return Branches([self.conv(c_in, 384, 3, 2), _chain(three), nn.MaxPool2d(3, 2)])

    def factored(self, c_in: int, width: int) -> Branches:
        """Figure 6: 7x7 as 1x7 and 7x1, once and twice; c_in to 768 channels."""
        once = [self.conv(c_in, width, 1), *self._seven(width, width, 192)]
        twice = [
            *(self.conv(c_in, width, 1), *self._seven(width, width, width, upright=True)),
            *self._seven(width, width, 192, upright=True),
        ]
        return Branches(
            [self.conv(c_in, 192, 1), _chain(once), _chain(twice), self._pooled(c_in, 192)]
        )

    def second_reduction(self, c_in: int) -> Branches:
        """A block that halves the size; c_in to c_in + 512 channels."""
        three = [self.conv(c_in, 192, 1), self.conv(192, 320, 3, 2)]
        seven = [self.conv(c_in, 192, 1), *self._seven(192, 192, 192), self.conv(192, 192, 3, 2)]
        return Branches([_chain(three), _chain(seven), nn.MaxPool2d(3, 2)])

    def expanded(self, c_in: int) -> Branches:
        """Figure 7: 3x3 as 1x3 beside 3x1; c_in to 2048 channels."""
        three = [self.conv(c_in, 384, 1), self._beside(384)]
        twice = [self.conv(c_in, 448, 1), self.conv(448, 384, 3, 1, 1), self._beside(384)]
        return Branches(
            [self.conv(c_in, 320, 1), _chain(three), _chain(twice), self._pooled(c_in, 192)]
        )

    def _pooled(self, c_in: int, c_out: int) -> nn.Sequential:
        return _chain([nn.AvgPool2d(3, 1, 1), self.conv(c_in, c_out, 1)])

    def _seven(
        self, c_in: int, width: int, c_out: int, *, upright: bool = False
    ) -> list[nn.Module]:
        flat, high = ((1, 7), (0, 3)), ((7, 1), (3, 0))
        (kernel, pad), (kernel2, pad2) = (high, flat) if upright else (flat, high)
        return [self.conv(c_in, width, kernel, 1, pad), self.conv(width, c_out, kernel2, 1, pad2)]

    def _beside(self, width: int) -> Branches:
        flat = self.conv(width, width, (1, 3), 1, (0, 1))
        return Branches([flat, self.conv(width, width, (3, 1), 1, (1, 0))])


class Inception3(nn.Module):
    """The network without its auxiliary classifier."""

    def __init__(self, num_classes: int, side: int, relu: Relu) -> None:
        super().__init__()
        make = Blocks(relu)
        self.features = nn.Sequential(
            *make.stem(side),
            *(make.wide(192, 32), make.wide(256, 64), make.wide(288, 64)),
            make.first_reduction(288),
            *(make.factored(768, width) for width in (128, 160, 160, 192)),
            make.second_reduction(768),
            *(make.expanded(1280), make.expanded(2048)),
            nn.AdaptiveAvgPool2d(1),
        )
        self.dropout = nn.Dropout(0.5)
        self.classifier = nn.Linear(2048, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, side, side]."""
        logits: torch.Tensor = self.classifier(self.dropout(self.features(images).flatten(1)))
        return logits


def inception3(num_classes: int = 1000, side: int = 299, relu: Relu = nn.ReLU) -> Inception3:
    """Inception-v3 with 23.8 million parameters."""
    return Inception3(num_classes, side, relu)


def _chain(modules: Sequence[nn.Module]) -> nn.Sequential:
    return nn.Sequential(*modules)
