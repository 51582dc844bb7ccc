"""The models whose saved tensors the advisor chooses codecs for.

The advisor's rules and rates were made with `bench.workloads.tasks.TASKS` at hand. The
others were not looked at: they show how far the rules carry.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor, nn

from bench.workloads.small_models import Net
from bench.workloads.tasks import RESNET, TASKS, make_task

if TYPE_CHECKING:
    from cswap.experiments.task import Task

UNSEEN: Final = ("lstm", RESNET)
MODELS: Final = (*TASKS, *UNSEEN)


class Lstm(Net):
    """A byte-level language model (vocabulary 256) of LSTM layers."""

    def __init__(self, n_layers: int, width: int) -> None:
        super().__init__()
        self.token = nn.Embedding(256, width)
        self.layers = nn.LSTM(width, width, n_layers, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, tokens: Tensor) -> Tensor:
        """Return the logits, [batch, 256, time], of tokens, [batch, time] int64."""
        x, _ = self.layers(self.token(tokens))
        logits: Tensor = self.head(x).transpose(1, 2)
        return logits


def advisor_task(name: str, *, quick: bool, n_steps: int) -> Task:
    """The task of one of MODELS, of so many steps."""
    if name != "lstm":
        return make_task(name, quick=quick, n_steps=n_steps)
    n_layers, width = (1, 64) if quick else (2, 256)
    return replace(
        make_task("gpt", quick=quick, n_steps=n_steps),
        name=name,
        build=lambda: Lstm(n_layers, width),
        optimizer=lambda net: torch.optim.AdamW(net.parameters(), 0.0, weight_decay=0.01),
        facts={"n_layers": n_layers, "width": width},
    )
