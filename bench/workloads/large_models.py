"""The networks that training on a GPU is measured on, with blocks that can be checkpointed."""

from __future__ import annotations

from contextlib import nullcontext
from typing import TYPE_CHECKING, Final

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from bench.workloads import networks

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from contextlib import AbstractContextManager

CONTEXT: Final = networks.CONTEXT
VOCABULARY: Final = networks.VOCABULARY
DROPOUT: Final = 0.1

GPT2_SMALL: Final = (12, 768, 12)
GPT2_MEDIUM: Final = (24, 1024, 16)
GPT2_LARGE: Final = (36, 1280, 20)
GPT_1_3B: Final = (24, 2048, 16)
"""Blocks, width and heads. The last has the blocks and the width of GPT-3 XL; its heads would not
divide the width."""


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


class Blocked(BlockModel):
    """A network whose layers of a type are its blocks.

    Args:
        net: the network.
        layers: of the network; those of type ``block`` become its blocks, in place.
        block: type of the blocks.
    """

    def __init__(self, net: nn.Module, layers: nn.Sequential, block: type[nn.Module]) -> None:
        super().__init__()
        self.net = net
        for index, layer in enumerate(layers):
            if isinstance(layer, block):
                layers[index] = _Block(layer, self.run_block)

    def forward(self, x: Tensor) -> Tensor:
        """Return the logits, [batch, n_classes], or [batch, vocabulary, time] of tokens."""
        logits: Tensor = self.net(x)
        return logits.transpose(1, 2) if logits.dim() == 3 else logits


class _Block(nn.Module):
    def __init__(self, block: nn.Module, run: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.block, self._run = block, run

    def forward(self, x: Tensor) -> Tensor:
        return self._run(self.block, x)


def vgg16() -> Blocked:
    """VGG-16; a block is a stage of convolutions with the pooling at its end."""
    net = networks.Vgg16()
    net.features = nn.Sequential(*_stages(net.features))
    return Blocked(net, net.features, nn.Sequential)


def _stages(layers: nn.Sequential) -> Iterator[nn.Sequential]:
    stage: list[nn.Module] = []
    for layer in layers:
        stage.append(layer)
        if isinstance(layer, nn.MaxPool2d):
            yield nn.Sequential(*stage)
            stage = []


def resnet50() -> Blocked:
    """ResNet-50; a block is a bottleneck."""
    net = networks.ResNet50()
    return Blocked(net, net.features, networks.Bottleneck)


def gpt2(n_layers: int, width: int, n_heads: int) -> Blocked:
    """GPT-2 with the initial embeddings of its paper's code; a block is a transformer block."""
    net = networks.Gpt2(n_layers, width, n_heads, DROPOUT)
    nn.init.normal_(net.token.weight, std=0.02)
    nn.init.normal_(net.position.weight, std=0.01)
    return Blocked(net, net.blocks, networks.GptBlock)


def count_parameters(model: nn.Module) -> int:
    """Elements of all parameters, shared ones once."""
    return sum(p.numel() for p in model.parameters())
