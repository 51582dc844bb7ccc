"""The networks of convolutions, pooling and large linear layers: AlexNet, OverFeat, VGG-16."""

from __future__ import annotations

import torch
from torch import nn

from bench.workloads.zoo.layers import SMALL_SIDE, Relu, activation, conv_relu, numel_of


class Classic(nn.Module):
    """Feature extraction, then a classifier of linear layers."""

    def __init__(self, features: nn.Sequential, classifier: nn.Sequential) -> None:
        super().__init__()
        self.features = features
        self.classifier = classifier

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        """Return the logits, [batch, classes], of images, [batch, 3, side, side]."""
        logits: torch.Tensor = self.classifier(self.features(images).flatten(1))
        return logits


def alexnet(num_classes: int = 1000, side: int = 224, relu: Relu = nn.ReLU) -> Classic:
    """AlexNet in one column (Krizhevsky, arXiv:1404.5997), without its response normalisation.

    For small images the first convolution is 3 x 3 with stride 2, and all pooling is 2 x 2.
    """
    small = side <= SMALL_SIDE
    pool = (2, 2) if small else (3, 2)
    if small:
        stem = conv_relu(3, 64, 3, relu, stride=2, padding=1)
    else:
        stem = conv_relu(3, 64, 11, relu, stride=4, padding=2)
    kernel = 3 if small else 5
    features = nn.Sequential(
        *stem,
        nn.MaxPool2d(*pool),
        *conv_relu(64, 192, kernel, relu, padding=kernel // 2),
        nn.MaxPool2d(*pool),
        *conv_relu(192, 384, 3, relu, padding=1),
        *conv_relu(384, 256, 3, relu, padding=1),
        *conv_relu(256, 256, 3, relu, padding=1),
        nn.MaxPool2d(*pool),
    )
    classifier = nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(numel_of(features, side), 4096),
        activation(relu),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        activation(relu),
        nn.Linear(4096, num_classes),
    )
    return Classic(features, classifier)


def overfeat(num_classes: int = 1000, side: int = 231, relu: Relu = nn.ReLU) -> Classic:
    """OverFeat, the fast model (Sermanet et al., arXiv:1312.6229, table 1).

    Published for images of 231 pixels. For small ones the stem is 3 x 3 without pooling.
    """
    if side <= SMALL_SIDE:
        stem = conv_relu(3, 96, 3, relu, padding=1)
    else:
        stem = [*conv_relu(3, 96, 11, relu, stride=4), nn.MaxPool2d(2)]
    features = nn.Sequential(
        *stem,
        *conv_relu(96, 256, 5, relu),
        nn.MaxPool2d(2),
        *conv_relu(256, 512, 3, relu, padding=1),
        *conv_relu(512, 1024, 3, relu, padding=1),
        *conv_relu(1024, 1024, 3, relu, padding=1),
        nn.MaxPool2d(2),
    )
    classifier = nn.Sequential(
        nn.Dropout(0.5),
        nn.Linear(numel_of(features, side), 3072),
        activation(relu),
        nn.Dropout(0.5),
        nn.Linear(3072, 4096),
        activation(relu),
        nn.Linear(4096, num_classes),
    )
    return Classic(features, classifier)


def vgg16(
    num_classes: int = 1000, side: int = 224, relu: Relu = nn.ReLU, extra_per_group: int = 0
) -> Classic:
    """VGG-16 (Simonyan & Zisserman, arXiv:1409.1556, configuration D).

    Args:
        num_classes: length of the logits.
        side: height and width of the images in pixels; a multiple of 32.
        relu: the activation.
        extra_per_group: convolutions added to each of the five groups; vDNN's VGG-416 has 80.
    """
    layers: list[nn.Module] = []
    c_in = 3
    for c_out, n_convs in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(n_convs + extra_per_group):
            layers += conv_relu(c_in, c_out, 3, relu, padding=1)
            c_in = c_out
        layers.append(nn.MaxPool2d(2))
    classifier = nn.Sequential(
        nn.Linear(512 * (side // 32) ** 2, 4096),
        activation(relu),
        nn.Dropout(0.5),
        nn.Linear(4096, 4096),
        activation(relu),
        nn.Dropout(0.5),
        nn.Linear(4096, num_classes),
    )
    return Classic(nn.Sequential(*layers), classifier)
