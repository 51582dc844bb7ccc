"""The models that demo and benchmarks train: sizes, data, optimizer and schedule of each."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import AdamW

from cswap.errors import ConfigError
from cswap.experiments.task import Task
from cswap.experiments.workloads.data import (
    Images,
    Text,
    digits,
    generator_of,
    in_unit,
    python_sources,
    windows,
)
from cswap.experiments.workloads.residual import ResNet
from cswap.experiments.workloads.small_models import CnnShape, Gpt, GptShape, Net, VggNet
from cswap.experiments.workloads.vision import SquaredReluMlp, Vit, VitShape

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.experiments.task import Batch

TASKS = ("cnn", "gpt", "vit", "mlp")

RESNET = "resnet"
"""A ResNet with batch norms, besides TASKS: those are the models that the codecs were made with."""

GPT6 = "gpt6"
"""A larger gpt, besides TASKS: its step saves six times as many bytes. The time that a saved tensor
costs whatever its size is a smaller share there, as it is in models that do not fit a device."""

_GPT_SHAPES = {
    "gpt": GptShape(),
    GPT6: GptShape(n_layers=6, width=256, n_heads=8, context=256),
}
_QUICK_GPT_SHAPE = GptShape(n_layers=2, width=64, context=64)

VALIDATION_BATCH = 512
"""Images at a time."""


def make_task(
    name: str, *, quick: bool, n_steps: int | None, data: Images | Text | None = None
) -> Task:
    """Return the task of one of TASKS, or of GPT6 or RESNET.

    Args:
        name: of the model.
        quick: small model, few steps.
        n_steps: None takes the task's own number.
        data: to train on; None takes the digits, or Python sources.

    Raises:
        ConfigError: the model does not take such data.
    """
    if data is not None and name not in fitting(data):
        raise ConfigError(
            f"model {name!r} does not learn from {data.source}; {', '.join(fitting(data))} would."
        )
    if name in _GPT_SHAPES:
        text = data if isinstance(data, Text) else python_sources()
        return _gpt(name, quick, n_steps, text)
    images = data if isinstance(data, Images) else digits(CnnShape().side)
    makers = {"cnn": _cnn, "vit": _vit, "mlp": _mlp, RESNET: _resnet}
    return makers[name](quick, n_steps, images)


def fitting(data: Images | Text) -> tuple[str, ...]:
    """Those of TASKS, and RESNET, that can be trained on it."""
    return ("gpt",) if isinstance(data, Text) else ("cnn", "vit", "mlp", RESNET)


def _cnn(quick: bool, n_steps: int | None, data: Images) -> Task:
    channels = (8, 16) if quick else CnnShape().channels
    shape = CnnShape(channels=channels, side=data.side, colours=data.channels)
    return _on_images(
        "cnn",
        lambda: VggNet(shape, data.n_classes),
        data,
        quick=quick,
        n_steps=n_steps,
        peak_lr=2e-3,
        facts={"channels": list(shape.channels)},
    )


def _resnet(quick: bool, n_steps: int | None, data: Images) -> Task:
    width, n = (8, 1) if quick else (16, 3)
    return _on_images(
        RESNET,
        lambda: ResNet(width, n, data.n_classes, data.channels),
        data,
        quick=quick,
        n_steps=n_steps,
        peak_lr=2e-3,
        facts={"width": width, "blocks": 3 * n},
    )


def _vit(quick: bool, n_steps: int | None, data: Images) -> Task:
    shape = replace(
        VitShape(n_layers=2, width=48) if quick else VitShape(),
        side=data.side,
        colours=data.channels,
    )
    facts: dict[str, object] = {
        "n_layers": shape.n_layers,
        "width": shape.width,
        "patch": shape.patch,
    }
    return _on_images(
        "vit",
        lambda: Vit(shape, data.n_classes),
        data,
        quick=quick,
        n_steps=n_steps,
        peak_lr=2e-3,
        facts=facts,
    )


def _mlp(quick: bool, n_steps: int | None, data: Images) -> Task:
    n_blocks = 2 if quick else 4
    return _on_images(
        "mlp",
        lambda: SquaredReluMlp(
            n_blocks=n_blocks, side=data.side, n_classes=data.n_classes, colours=data.channels
        ),
        data,
        quick=quick,
        n_steps=n_steps,
        peak_lr=1e-3,
        facts={"n_blocks": n_blocks, "width": 256, "activation": "squared ReLU"},
        batch_size=256,
    )


def _on_images(
    name: str,
    build: Callable[[], Net],
    data: Images,
    *,
    quick: bool,
    n_steps: int | None,
    peak_lr: float,
    facts: dict[str, object],
    batch_size: int = 64,
) -> Task:
    batch_size = 32 if quick else batch_size

    def batch(seed: int, step: int) -> Batch:
        chosen = torch.randint(
            len(data.train_images), (batch_size,), generator=generator_of(seed, step)
        )
        return in_unit(data.train_images[chosen]), data.train_labels[chosen]

    return Task(
        name=name,
        n_steps=n_steps or (6 if quick else 110),
        peak_lr=peak_lr,
        build=build,
        optimizer=lambda net: AdamW(net.parameters(), 0.0, weight_decay=0.05),
        batch=batch,
        validation=_in_batches(data.validation_images, data.validation_labels),
        facts={
            "data": data.source,
            "input": [data.channels, data.side, data.side],
            "n_classes": data.n_classes,
            **facts,
            "batch": batch_size,
            "n_train": len(data.train_images),
            "n_validation": len(data.validation_images),
        },
    )


def _in_batches(images: Tensor, labels: Tensor) -> tuple[Batch, ...]:
    parts = zip(images.split(VALIDATION_BATCH), labels.split(VALIDATION_BATCH), strict=True)
    return tuple((in_unit(some), of_some) for some, of_some in parts)


def _gpt(name: str, quick: bool, n_steps: int | None, text: Text) -> Task:
    shape = _QUICK_GPT_SHAPE if quick else _GPT_SHAPES[name]
    batch_size = 8

    def batch(seed: int, step: int) -> Batch:
        last = len(text.train) - shape.context
        starts = torch.randint(last, (batch_size,), generator=generator_of(seed, step))
        return windows(text.train, starts, shape.context)

    n_validation = 4 if quick else 6
    spread_out = torch.linspace(0, len(text.validation) - shape.context - 1, 16 * n_validation)
    return Task(
        name=name,
        n_steps=n_steps or (6 if quick else 100),
        peak_lr=3e-3,
        build=lambda: Gpt(shape),
        optimizer=lambda net: AdamW(net.parameters(), 0.0, betas=(0.9, 0.95), weight_decay=0.01),
        batch=batch,
        validation=tuple(
            windows(text.validation, starts.long(), shape.context)
            for starts in spread_out.chunk(n_validation)
        ),
        facts={
            "data": text.source,
            "n_files": text.n_files,
            "sha256": text.sha256,
            "n_train_bytes": len(text.train),
            "n_validation_bytes": len(text.validation),
            "n_layers": shape.n_layers,
            "width": shape.width,
            "n_heads": shape.n_heads,
            "context": shape.context,
            "batch": batch_size,
        },
    )
