"""GoogLeNet (Szegedy et al., arXiv:1409.4842, table 1)."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.zoo.layers import SMALL_SIDE, Relu, conv_relu

# per module: 1x1 | 3x3 reduce, 3x3 | 5x5 reduce, 5x5 | pool projection
_BEFORE_POOL_3 = ((64, 96, 128, 16, 32, 32), (128, 128, 192, 32, 96, 64))
_BEFORE_POOL_4 = (
    (192, 96, 208, 16, 48, 64),
    (160, 112, 224, 24, 64, 64),
    (128, 128, 256, 24, 64, 64),
    (112, 144, 288, 32, 64, 64),
    (256, 160, 320, 32, 128, 128),
)
_AFTER = ((256, 160, 320, 32, 128, 128), (384, 192, 384, 48, 128, 128))


class Inception(nn.Module):
    """Four branches over one input, their channels put side by side."""

    def __init__(self, c_in: int, widths: tuple[int, ...], relu: Relu) -> None:
        super().__init__()
        one, reduce3, three, reduce5, five, projection = widths
        self.c_out = one + three + five + projection
        self.branches = nn.ModuleList(
            [
                nn.Sequential(*conv_relu(c_in, one, 1, relu)),
                nn.Sequential(
                    *conv_relu(c_in, reduce3, 1, relu),
                    *conv_relu(reduce3, three, 3, relu, padding=1),
                ),
                nn.Sequential(
                    *conv_relu(c_in, reduce5, 1, relu),
                    *conv_relu(reduce5, five, 5, relu, padding=2),
                ),
                nn.Sequential(
                    nn.MaxPool2d(3, stride=1, padding=1), *conv_relu(c_in, projection, 1, relu)
                ),
            ]
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, c_in, h, w] to [batch, c_out, h, w]."""
        return torch.cat([branch(x) for branch in self.branches], 1)


class GoogLeNet(nn.Module):
    """Without response normalisation and without the two auxiliary classifiers."""

    def __init__(self, num_classes: int, side: int, relu: Relu) -> None:
        super().__init__()
        c_in = 192
        layers = _stem(side, relu)
        for group in (_BEFORE_POOL_3, _BEFORE_POOL_4, _AFTER):
            for widths in group:
                inception = Inception(c_in, widths, relu)
                layers.append(inception)
                c_in = inception.c_out
            if group is not _AFTER:
                layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.dropout = nn.Dropout(0.4)
        self.classifier = nn.Linear(c_in, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, side, side]."""
        logits: torch.Tensor = self.classifier(self.dropout(self.features(images).flatten(1)))
        return logits


def googlenet(num_classes: int = 1000, side: int = 224, relu: Relu = nn.ReLU) -> GoogLeNet:
    """GoogLeNet; for small images the stem is one 3 x 3 convolution without pooling."""
    return GoogLeNet(num_classes, side, relu)


def _stem(side: int, relu: Relu) -> list[nn.Module]:
    if side <= SMALL_SIDE:
        return conv_relu(3, 192, 3, relu, padding=1)
    return [
        *conv_relu(3, 64, 7, relu, stride=2, padding=3),
        nn.MaxPool2d(3, 2, ceil_mode=True),
        *conv_relu(64, 64, 1, relu),
        *conv_relu(64, 192, 3, relu, padding=1),
        nn.MaxPool2d(3, 2, ceil_mode=True),
    ]
