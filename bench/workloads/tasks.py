"""The models that demo and benchmarks train: sizes, data, optimizer and schedule of each."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

import torch
from torch.optim import AdamW

from bench.workloads.data import digits, generator_of, python_sources, windows
from bench.workloads.residual import ResNet
from bench.workloads.small_models import CnnShape, Gpt, GptShape, Net, VggNet
from bench.workloads.vision import SquaredReluMlp, Vit, VitShape
from cswap.experiments.task import Task

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

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

SIDE = CnnShape().side
"""Height and width of the pictures, in pixels."""


def make_task(name: str, *, quick: bool, n_steps: int | None) -> Task:
    """Return the task of one of TASKS, or of GPT6 or RESNET.

    Args:
        name: of the model.
        quick: small model, few steps.
        n_steps: None takes the task's own number.
    """
    if name in _GPT_SHAPES:
        return _gpt(name, quick, n_steps)
    makers = {"cnn": _cnn, "vit": _vit, "mlp": _mlp, RESNET: _resnet}
    return makers[name](quick, n_steps)


def _cnn(quick: bool, n_steps: int | None) -> Task:
    shape = CnnShape(channels=(8, 16)) if quick else CnnShape()
    facts = {"channels": list(shape.channels)}
    return _on_digits("cnn", lambda: VggNet(shape), quick, n_steps, 2e-3, facts)


def _resnet(quick: bool, n_steps: int | None) -> Task:
    width, n = (8, 1) if quick else (16, 3)
    facts = {"width": width, "blocks": 3 * n}
    return _on_digits(RESNET, lambda: ResNet(width, n), quick, n_steps, 2e-3, facts)


def _vit(quick: bool, n_steps: int | None) -> Task:
    shape = VitShape(n_layers=2, width=48) if quick else VitShape()
    return _on_digits("vit", lambda: Vit(shape), quick, n_steps, 2e-3, vit_facts(shape))


def vit_facts(shape: VitShape) -> dict[str, object]:
    """Sizes of a vision transformer, for the report."""
    return {"n_layers": shape.n_layers, "width": shape.width, "patch": shape.patch}


def _mlp(quick: bool, n_steps: int | None) -> Task:
    n_blocks = 2 if quick else 4
    facts = {"n_blocks": n_blocks, "width": 256, "activation": "squared ReLU"}
    build = partial(SquaredReluMlp, n_blocks=n_blocks)
    return _on_digits("mlp", build, quick, n_steps, 1e-3, facts, 32 if quick else 256)


def _on_digits(
    name: str,
    build: Callable[[], Net],
    quick: bool,
    n_steps: int | None,
    peak_lr: float,
    facts: Mapping[str, object],
    batch_size: int | None = None,
) -> Task:
    batch_size, data = batch_size or (32 if quick else 64), digits(SIDE)

    def batch(seed: int, step: int) -> Batch:
        chosen = torch.randint(
            len(data.train_images), (batch_size,), generator=generator_of(seed, step)
        )
        return data.train_images[chosen], data.train_labels[chosen]

    held_out = (data.validation_images, data.validation_labels)
    return Task(
        name=name,
        n_steps=n_steps or (6 if quick else 110),
        peak_lr=peak_lr,
        build=build,
        optimizer=lambda net: AdamW(net.parameters(), 0.0, weight_decay=0.05),
        batch=batch,
        validation=(held_out,),
        facts={
            "data": data.source,
            "input": [1, SIDE, SIDE],
            "n_classes": 10,
            **facts,
            "batch": batch_size,
            "n_train": len(data.train_images),
            "n_validation": len(data.validation_images),
        },
    )


def _gpt(name: str, quick: bool, n_steps: int | None) -> Task:
    text = python_sources()
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
