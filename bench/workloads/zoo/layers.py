"""Shared by the zoo's image models: the activation option and the size of a feature map.

Every image model is built for square images of ``side`` pixels. Up to `SMALL_SIDE` its stem is the
one that is usual for CIFAR (stride 1, no pooling), because the published ImageNet stems leave
nothing of a 32 x 32 image.
"""

from __future__ import annotations

from typing import TypeAlias

import torch
from torch import nn
from torch.func import functional_call

Relu: TypeAlias = type[nn.ReLU] | type[nn.LeakyReLU]
"""Sparse or dense feature maps: the two kinds of network that CSWAP+ compares."""

SMALL_SIDE = 64


def activation(relu: Relu) -> nn.Module:
    """The activation, in place: as torchvision and vDNN have it, it needs no map of its own."""
    return relu(inplace=True)


def conv_relu(c_in: int, c_out: int, kernel: int, relu: Relu, **options: int) -> list[nn.Module]:
    """A convolution with bias and its activation; options: stride and padding in pixels."""
    stride, padding = options.get("stride", 1), options.get("padding", 0)
    return [nn.Conv2d(c_in, c_out, kernel, stride, padding), activation(relu)]


def conv_norm(
    c_in: int, c_out: int, kernel: int, *, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    """A convolution that keeps the image's size (but for the stride), and its batch norm."""
    conv = nn.Conv2d(c_in, c_out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(c_out)]


def numel_of(features: nn.Module, side: int) -> int:
    """Elements per image that these layers make of 3 x side x side. Nothing is computed."""
    weights = {n: torch.empty_like(p, device="meta") for n, p in features.named_parameters()}
    image = torch.empty(1, 3, side, side, device="meta")
    with torch.no_grad():
        return int(functional_call(features, weights, (image,)).numel())
