"""The six networks as CSWAP, CSwap+ and HOME seem to have run them, on the meta device.

The papers give no shapes. Where the zoo's default contradicts their measurements, another
usual form of the network is taken, chosen by their samples per second and share of transfers:

* AlexNet for CIFAR-10: 77 000 samples/s under vDNN leave some 90 MFLOP per sample and step. That is
  the usual small one (11 x 11 stem with stride 4, 2 x 2 pooling, one linear layer).
* Plain-20: He's has 16 channels. 1 780 samples/s, of which 73 % is transfer, and 1 040 samples in
  11 GB (HOME) mean several times as many: 64.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch
from torch import nn

from bench.papers.inception import inception3
from bench.papers.published import SIDES
from bench.workloads.zoo.catalogue import build, example, loss
from bench.workloads.zoo.classics import Classic
from bench.workloads.zoo.layers import Relu, conv_relu
from cswap.plan.estimate import estimate

if TYPE_CHECKING:
    from cswap.plan.hardware import Hardware
    from cswap.schema.trace import Trace

PLAIN_WIDTH: Final = 64


def network(model: str, dataset: str, relu: Relu = nn.ReLU) -> nn.Module:
    """One of `published.MODELS` for a data set of `published.SIDES`."""
    n_classes, side = (10 if dataset == "cifar10" else 1000), SIDES[dataset]
    if model == "alexnet" and dataset == "cifar10":
        with torch.device("meta"):
            return _small_alexnet(n_classes, relu)
    if model == "inception3":
        with torch.device("meta"):
            return inception3(n_classes, side, relu)
    options: dict[str, Any] = {"width": PLAIN_WIDTH} if model == "plain20" else {}
    return build(model, num_classes=n_classes, side=side, relu=relu, **options)


def step(
    model: str,
    dataset: str,
    batch: int,
    hardware: Hardware,
    relu: Relu = nn.ReLU,
    **options: Any,
) -> Trace:
    """The estimated trace of a training step; options as for `estimate`."""
    # The batch of all networks is the same; the zoo does not list all of them.
    inputs, target = example("vgg16", batch, SIDES[dataset])
    net = network(model, dataset, relu)
    return estimate(net, inputs, loss, target, hardware=hardware, name=model, **options)


def _small_alexnet(num_classes: int, relu: Relu) -> Classic:
    features = nn.Sequential(
        *conv_relu(3, 64, 11, relu, stride=4, padding=5),
        nn.MaxPool2d(2),
        *conv_relu(64, 192, 5, relu, padding=2),
        nn.MaxPool2d(2),
        *conv_relu(192, 384, 3, relu, padding=1),
        *conv_relu(384, 256, 3, relu, padding=1),
        *conv_relu(256, 256, 3, relu, padding=1),
        nn.MaxPool2d(2),
    )
    return Classic(features, nn.Sequential(nn.Linear(256, num_classes)))
