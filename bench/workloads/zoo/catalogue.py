"""Every model of the zoo: how to build it, its inputs, and its published size."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from torch.nn import functional

from bench.workloads.zoo import classics, compact, googlenet, gpt2, residual

if TYPE_CHECKING:
    from collections.abc import Callable


@dataclass(frozen=True, slots=True)
class Entry:
    """One model.

    Attributes:
        build: makes the module, on the default device; options as its own docstring says.
        parameters: count with the default options, our definition's.
        published: the same as it was published, in words.
        source: where.
        side: height and width of the images in pixels; 0 if it does not take images.
        kind: of its inputs.
        n_classes: of the default options.
    """

    build: Callable[..., nn.Module]
    parameters: int
    published: str
    source: str
    side: int = 224
    kind: Literal["images", "tokens"] = "images"
    n_classes: int = 1000


def _gpt2(size: str, parameters: int, published: str) -> Entry:
    def build(**options: Any) -> nn.Module:
        return gpt2.gpt2(size, **options)

    source = "checkpoints of huggingface.co/openai-community"
    return Entry(build, parameters, published, source, 0, "tokens", gpt2.VOCABULARY)


_TORCHVISION = "torchvision's table of weights"

ZOO: dict[str, Entry] = {
    "alexnet": Entry(classics.alexnet, 61_100_840, "61100840", _TORCHVISION),
    "overfeat": Entry(classics.overfeat, 145_920_872, "145 million", "arXiv:1312.6229 §3", 231),
    "googlenet": Entry(googlenet.googlenet, 6_998_552, "6.8 to 7 million", "arXiv:1409.4842"),
    "vgg16": Entry(classics.vgg16, 138_357_544, "138357544", _TORCHVISION),
    "resnet50": Entry(residual.resnet50, 25_557_032, "25557032", _TORCHVISION),
    "squeezenet1.0": Entry(compact.squeezenet10, 1_248_424, "1248424", _TORCHVISION),
    "squeezenet1.1": Entry(compact.squeezenet11, 1_235_496, "1235496", _TORCHVISION),
    "mobilenet": Entry(compact.mobilenet, 4_231_976, "4.2 million", "arXiv:1704.04861, table 8"),
    "plain20": Entry(
        residual.plain20, 269_722, "0.27 million", "arXiv:1512.03385, table 6", 32, n_classes=10
    ),
    "gpt2": _gpt2("small", 124_439_808, "124439808"),
    "gpt2-medium": _gpt2("medium", 354_823_168, "354823168"),
    "gpt2-large": _gpt2("large", 774_030_080, "774030080"),
    "gpt2-xl": _gpt2("xl", 1_557_611_200, "1557611200"),
}
"""By name. CSWAP's AlexNet, VGG16, MobileNet, ResNet, SqueezeNet and Plain20 are here as the
commonest network of that name: the papers do not say which depth or version theirs is."""


def build(name: str, **options: Any) -> nn.Module:
    """The model on the meta device: shapes, and no memory.

    Args:
        name: of `ZOO`.
        **options: of its function, such as ``num_classes``, ``side`` and ``relu``.
    """
    with torch.device("meta"):
        return ZOO[name].build(**options)


def example(
    name: str, batch: int, side: int | None = None, time: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """One batch on the meta device: the model's inputs, and the target of `loss`.

    Args:
        name: of `ZOO`.
        batch: samples.
        side: of images, in pixels; default: as published.
        time: tokens; default: 1024.
    """
    entry = ZOO[name]
    with torch.device("meta"):
        target = torch.empty(batch, dtype=torch.int64)
        if entry.kind == "images":
            side = side or entry.side
            return torch.empty(batch, 3, side, side), target
        tokens = torch.empty(batch, time or gpt2.CONTEXT, dtype=torch.int64)
        return tokens, torch.empty_like(tokens)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross-entropy of logits [..., classes] and classes [...]."""
    return functional.cross_entropy(output.flatten(0, -2), target.flatten())
