"""Models with their losses inside, so that all that a step saves is saved by the model."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from cswap.experiments.workloads.small_models import Net
from cswap.experiments.workloads.tasks import make_task

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from cswap.experiments.task import Task
    from cswap.experiments.workloads.small_models import Probe

MODELS = ("gpt", "gpt6", "vit", "cnn", "resnet")

_current_backward = torch._C._current_graph_task_id  # noqa: SLF001
NO_BACKWARD = -1


class BasicBlock(nn.Module):
    """relu(x + norm(conv(relu(norm(conv(x)))))) (He et al. 2015, section 4.2)."""

    def __init__(self, c_in: int, c_out: int, stride: int) -> None:
        super().__init__()
        self.body = nn.Sequential(
            nn.Conv2d(c_in, c_out, 3, stride, 1, bias=False),
            nn.BatchNorm2d(c_out),
            nn.ReLU(),
            nn.Conv2d(c_out, c_out, 3, 1, 1, bias=False),
            nn.BatchNorm2d(c_out),
        )
        self.skip = nn.Sequential()
        if stride > 1 or c_in != c_out:
            self.skip = nn.Sequential(
                nn.Conv2d(c_in, c_out, 1, stride, bias=False), nn.BatchNorm2d(c_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """Return the block's output, [batch, c_out, height / stride, width / stride]."""
        return functional.relu(self.skip(x) + self.body(x))


class ResNet(Net):
    """ResNet for small images (He et al. 2015, section 4.2) with 3 stages of ``n`` blocks."""

    def __init__(self, width: int, n: int, n_classes: int = 10, colours: int = 1) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(colours, width, 3, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        self.blocks = nn.ModuleList()
        c_in = width
        for stage in range(3):
            for i in range(n):
                stride = 2 if stage and not i else 1
                self.blocks.append(BasicBlock(c_in, width << stage, stride))
                c_in = width << stage
        self.head = nn.Linear(c_in, n_classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the logits, [batch, n_classes], of images, [batch, colours, side, side]."""
        x = self.stem(images)
        for block in self.blocks:
            x = block(x)
        logits: Tensor = self.head(x.mean((2, 3)))
        return logits


def fit_task(name: str, *, quick: bool) -> Task:
    """The task of one of MODELS."""
    if name != "resnet":
        return make_task(name, quick=quick, n_steps=None)
    width, n = (8, 1) if quick else (16, 3)
    task = make_task("cnn", quick=quick, n_steps=None)
    facts = {k: v for k, v in task.facts.items() if k != "channels"}
    return replace(
        task,
        name=name,
        build=lambda: ResNet(width, n),
        facts={**facts, "width": width, "blocks": 3 * n},
    )


class WithLoss(nn.Module):
    """A model that returns its loss.

    Attributes:
        net: the model.
        probe: entered around every forward pass and every recomputation.
    """

    def __init__(self, net: Net) -> None:
        super().__init__()
        self.net = net
        self.probe: Probe = nullcontext
        for module in net.modules():
            if any(True for _ in module.children()):
                module.forward = partial(_probed, self, module.forward)

    def forward(self, inputs: Tensor, targets: Tensor) -> Tensor:
        """Return the mean cross entropy."""
        with self.probe():
            return functional.cross_entropy(self.net(inputs), targets)

    @property
    def blocks(self) -> list[nn.Module]:
        """The blocks that a user would checkpoint."""
        found = getattr(self.net, "blocks", None) or self.net.stages
        assert isinstance(found, nn.ModuleList)
        return list(found)

    def checkpoint(self, blocks: Iterable[nn.Module]) -> None:
        """Run these blocks under torch's checkpointing from now on."""
        for block in blocks:
            block.forward = partial(checkpoint, block.forward, use_reentrant=False)


def _probed(owner: WithLoss, forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    # Only in backward: before it, the probe of the whole forward is there.
    if _current_backward() == NO_BACKWARD:
        return forward(*args, **kwargs)
    with owner.probe():
        return forward(*args, **kwargs)
