"""The small networks: SqueezeNet 1.0 and 1.1, MobileNet v1."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.zoo.layers import SMALL_SIDE, Relu, activation, conv_norm, conv_relu


class Fire(nn.Module):
    """A squeeze to few channels, then 1x1 and 3x3 convolutions side by side."""

    def __init__(self, c_in: int, squeeze: int, expand: int, relu: Relu) -> None:
        super().__init__()
        self.squeeze = nn.Sequential(*conv_relu(c_in, squeeze, 1, relu))
        self.one = nn.Sequential(*conv_relu(squeeze, expand, 1, relu))
        self.three = nn.Sequential(*conv_relu(squeeze, expand, 3, relu, padding=1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, c_in, h, w] to [batch, 2 * expand, h, w]."""
        squeezed = self.squeeze(x)
        return torch.cat([self.one(squeezed), self.three(squeezed)], 1)


class SqueezeNet(nn.Module):
    """SqueezeNet (Iandola et al., arXiv:1602.07360)."""

    def __init__(
        self, stem: list[nn.Module], pool_after: tuple[int, ...], num_classes: int, relu: Relu
    ) -> None:
        super().__init__()
        c_in = next(m.out_channels for m in stem if isinstance(m, nn.Conv2d))
        layers = [*stem, nn.MaxPool2d(3, 2, ceil_mode=True)]
        widths = (16, 16, 32, 32, 48, 48, 64, 64)
        for fire, squeeze in enumerate(widths):
            layers.append(Fire(c_in, squeeze, 4 * squeeze, relu))
            c_in = 8 * squeeze
            if fire in pool_after:
                layers.append(nn.MaxPool2d(3, 2, ceil_mode=True))
        self.features = nn.Sequential(*layers)
        self.classifier = nn.Sequential(
            nn.Dropout(0.5), *conv_relu(c_in, num_classes, 1, relu), nn.AdaptiveAvgPool2d(1)
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, side, side]."""
        logits: torch.Tensor = self.classifier(self.features(images)).flatten(1)
        return logits


def squeezenet10(num_classes: int = 1000, side: int = 224, relu: Relu = nn.ReLU) -> SqueezeNet:
    """SqueezeNet 1.0; for small images the first convolution is 3 x 3 with stride 1."""
    if side <= SMALL_SIDE:
        stem = conv_relu(3, 96, 3, relu, padding=1)
    else:
        stem = conv_relu(3, 96, 7, relu, stride=2)
    return SqueezeNet(stem, (2, 6), num_classes, relu)


def squeezenet11(num_classes: int = 1000, side: int = 224, relu: Relu = nn.ReLU) -> SqueezeNet:
    """SqueezeNet 1.1: the same accuracy with 2.4 times less arithmetic."""
    small = side <= SMALL_SIDE
    stem = conv_relu(3, 64, 3, relu, stride=1 if small else 2, padding=int(small))
    return SqueezeNet(stem, (1, 3), num_classes, relu)


class MobileNet(nn.Module):
    """MobileNet v1 (Howard et al., arXiv:1704.04861, table 1)."""

    def __init__(self, num_classes: int, side: int, relu: Relu) -> None:
        super().__init__()
        stride = 1 if side <= SMALL_SIDE else 2
        layers = [*conv_norm(3, 32, 3, stride=stride), activation(relu)]
        c_in = 32
        blocks = [(64, 1), (128, 2), (128, 1), (256, 2), (256, 1), (512, 2)]
        for c_out, stride in [*blocks, *([(512, 1)] * 5), (1024, 2), (1024, 1)]:
            layers += [*conv_norm(c_in, c_in, 3, stride=stride, groups=c_in), activation(relu)]
            layers += [*conv_norm(c_in, c_out, 1), activation(relu)]
            c_in = c_out
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(c_in, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, side, side]."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def mobilenet(num_classes: int = 1000, side: int = 224, relu: Relu = nn.ReLU) -> MobileNet:
    """MobileNet v1 at full width; for small images the first convolution has stride 1."""
    return MobileNet(num_classes, side, relu)
