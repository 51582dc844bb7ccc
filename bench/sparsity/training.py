"""Short real training runs that measure the values of saved tensors at checkpoints.

The models are the zoo's at 32 x 32, on scikit-learn's digits in three equal channels, and a GPT-2
of four blocks on Python source (its bytes as tokens). The papers
trained on other data. The runs give an estimate of each layer's sparsity and compressibility after
a little learning, where no other data is available.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import torch
from torch import nn

from bench.workloads.data import digits, generator_of, python_sources, windows
from bench.workloads.zoo.catalogue import ZOO, loss
from bench.workloads.zoo.gpt2 import Gpt2
from cswap.plan.measure import measure
from cswap.plan.tensor_values import values_of

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from cswap.plan.tensor_values import Values

SIDE: Final = 32
CODECS: Final = (
    *("zvc", "csr", "rle", "zvc+expk", "expk", "bitpack", "bf16", "fp16"),
    *("int8", "fp8", "mxfp8", "int4", "zvc+int8", "zvc+fp8", "zvc+int4"),
)
"""Codecs whose ratios are measured: the codecs that have rates in hardware profiles."""

ACTIVATIONS: Final = {"relu": nn.ReLU, "leaky": nn.LeakyReLU}
CHECKPOINTS: Final = 4


@dataclass(frozen=True, slots=True)
class Run:
    """One training run.

    Attributes:
        model: name of a model of the zoo.
        steps: optimizer steps. Checkpoints are before the first, after the last, and twice between.
        batch: samples per step.
        lr: learning rate of Adam.
    """

    model: str
    steps: int
    batch: int
    lr: float


RUNS: Final = {
    run.model: run
    for run in (
        Run("alexnet", 90, 32, 3e-4),
        Run("vgg16", 36, 16, 1e-4),
        Run("plain20", 120, 32, 2e-3),
        Run("mobilenet", 60, 32, 2e-3),
        Run("resnet50", 12, 16, 1e-3),
        Run("squeezenet1.0", 60, 16, 3e-4),
        Run("gpt2", 60, 4, 1e-3),
    )
}
"""Runs by model. The papers do not define their ResNet; it is ResNet-50 here. It has fewer steps
than the others, because a step takes seconds. SqueezeNet is version 1.0."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The measurements at one moment of a run.

    Attributes:
        step: number of optimizer steps done.
        loss: training loss of the batch, in nats.
        values: values of every saved tensor.
    """

    step: int
    loss: float
    values: tuple[Values, ...]


Batch = tuple[torch.Tensor, torch.Tensor]


def train(run: Run, activation: str, *, seed: int = 0) -> Iterator[Checkpoint]:
    """Train and yield the measurements of each checkpoint.

    Args:
        run: the model and its number of steps.
        activation: a key of `ACTIVATIONS`; GPT-2 has its own.
        seed: seed of weights and batches.
    """
    torch.manual_seed(seed)
    model, batches = _task(run, activation, seed)
    optimizer = torch.optim.Adam(model.parameters(), lr=run.lr)
    wanted = {round(run.steps * k / (CHECKPOINTS - 1)) for k in range(CHECKPOINTS)}
    for step in range(run.steps + 1):
        inputs, target = batches(step)
        if step in wanted:
            yield Checkpoint(step, *_look(model, inputs, target))
        optimizer.zero_grad()
        loss(model(inputs), target).backward()
        optimizer.step()


def _look(
    model: nn.Module, inputs: torch.Tensor, target: torch.Tensor
) -> tuple[float, tuple[Values, ...]]:
    trace = measure(
        model, inputs, loss, target, warm_up=0, repeats=1, min_bytes=0, codecs=CODECS,
        every_word=True,
    )  # fmt: skip
    with torch.no_grad():
        return float(loss(model(inputs), target)), values_of(trace)


def _task(run: Run, activation: str, seed: int) -> tuple[nn.Module, Callable[[int], Batch]]:
    if run.model == "gpt2":
        return _gpt(run, seed)
    data = digits(SIDE)
    images = ((data.train_images - data.train_images.mean()) / data.train_images.std()).expand(
        -1, 3, -1, -1
    )

    def batch(step: int) -> Batch:
        chosen = torch.randint(len(images), (run.batch,), generator=generator_of(seed, step))
        return images[chosen].contiguous(), data.train_labels[chosen]

    relu = ACTIVATIONS[activation]
    model = ZOO[run.model].build(num_classes=10, side=SIDE, relu=relu)
    for module in model.modules():
        if isinstance(module, nn.Conv2d | nn.Linear):
            # As torchvision's VGG: with torch's default, deep nets without norm do not start.
            nn.init.kaiming_normal_(module.weight, nonlinearity="relu")
            if module.bias is not None:
                nn.init.zeros_(module.bias)
    return model, batch


def _gpt(run: Run, seed: int) -> tuple[nn.Module, Callable[[int], Batch]]:
    text, length = python_sources().train, 128

    def batch(step: int) -> Batch:
        high = len(text) - length - 1
        starts = torch.randint(high, (run.batch,), generator=generator_of(seed, step))
        return windows(text, starts, length)

    model = Gpt2(4, 256, 4, 0.1)
    for parameter in model.parameters():
        if parameter.ndim > 1:
            nn.init.normal_(parameter, std=0.02)  # as GPT-2's authors did
    return model, batch
