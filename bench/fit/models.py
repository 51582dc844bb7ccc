"""Models with their losses inside, so that all that a step saves is saved by the model."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from bench.workloads.small_models import Net, Probe

MODELS = ("gpt", "gpt6", "vit", "cnn", "resnet")

_current_backward = torch._C._current_graph_task_id  # noqa: SLF001
NO_BACKWARD = -1


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
