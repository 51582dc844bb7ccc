"""ResNet-50 and its wide kin, and the plain network that they were compared with."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.zoo.layers import SMALL_SIDE, Relu, activation, conv_norm


class Bottleneck(nn.Module):
    """1x1, 3x3 (with the stride), 1x1, and a shortcut around them."""

    def __init__(self, c_in: int, width: int, stride: int, relu: Relu) -> None:
        super().__init__()
        c_out = 4 * width
        self.body = nn.Sequential(
            *conv_norm(c_in, width, 1),
            activation(relu),
            *conv_norm(width, width, 3, stride=stride),
            activation(relu),
            *conv_norm(width, c_out, 1),
        )
        same = stride == 1 and c_in == c_out
        self.shortcut = (
            nn.Identity() if same else nn.Sequential(*conv_norm(c_in, c_out, 1, stride=stride))
        )
        self.relu = activation(relu)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[batch, c_in, h, w] to [batch, 4 * width, h / stride, w / stride]."""
        out = self.body(x)
        out += self.shortcut(x)
        activated: torch.Tensor = self.relu(out)
        return activated


class ResNet(nn.Module):
    """A residual network of bottlenecks (He et al., arXiv:1512.03385, table 1)."""

    def __init__(self, blocks: tuple[int, ...], num_classes: int, side: int, relu: Relu) -> None:
        super().__init__()
        width = 64
        if side <= SMALL_SIDE:
            stem = [*conv_norm(3, width, 3), activation(relu)]
        else:
            stem = [*conv_norm(3, width, 7, stride=2), activation(relu), nn.MaxPool2d(3, 2, 1)]
        c_in = width
        stages: list[nn.Module] = []
        for index, n_blocks in enumerate(blocks):
            for block in range(n_blocks):
                stride = 2 if index and not block else 1
                stages.append(Bottleneck(c_in, width << index, stride, relu))
                c_in = 4 * (width << index)
        self.features = nn.Sequential(*stem, *stages, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(c_in, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, side, side]."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def resnet50(num_classes: int = 1000, side: int = 224, relu: Relu = nn.ReLU) -> ResNet:
    """ResNet-50 with the stride in the 3x3 convolution, as torchvision has it."""
    return ResNet((3, 4, 6, 3), num_classes, side, relu)


class Plain(nn.Module):
    """Plain-20: nineteen 3x3 convolutions and a linear layer, no shortcuts."""

    def __init__(self, num_classes: int, relu: Relu, width: int) -> None:
        super().__init__()
        layers: list[nn.Module] = [*conv_norm(3, width, 3), activation(relu)]
        c_in = width
        for stage in range(3):
            for layer in range(6):
                stride = 2 if stage and not layer else 1
                layers += [*conv_norm(c_in, width << stage, 3, stride=stride), activation(relu)]
                c_in = width << stage
        self.features = nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1))
        self.classifier = nn.Linear(c_in, num_classes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, side, side]."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def plain20(num_classes: int = 10, side: int = 32, relu: Relu = nn.ReLU, width: int = 16) -> Plain:
    """Plain-20 (He et al., section 4.2).

    CSWAP and HOME do not say how wide theirs is; by their samples per second and bytes per sample
    it is several times wider than He's 16 channels.

    Args:
        num_classes: length of the logits.
        side: any; the network is the same for all sizes.
        relu: the activation.
        width: channels of the first stage.
    """
    del side
    return Plain(num_classes, relu, width)
