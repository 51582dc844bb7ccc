"""What demo and benchmarks train: per model its sizes, data, optimizer and schedule."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import AdamW, Optimizer

from bench.data import digits, python_sources, windows
from bench.models import CnnShape, Gpt, GptShape, Net, VggNet
from bench.vision import SquaredReluMlp, Vit, VitShape

if TYPE_CHECKING:
    from collections.abc import Callable

Batch = tuple[Tensor, Tensor]

TASKS = ("cnn", "gpt", "vit", "mlp")


@dataclass(frozen=True, slots=True)
class Task:
    """One model to train.

    Attributes:
        name: one of TASKS.
        n_steps: training steps.
        peak_lr: learning rate after the warm-up.
        build: makes the model from torch's global random state.
        optimizer: makes its optimizer.
        batch: (seed, step) -> inputs and targets.
        validation: fixed batches that are never trained on.
        facts: sizes and data, for the report.
    """

    name: str
    n_steps: int
    peak_lr: float
    build: Callable[[], Net]
    optimizer: Callable[[Net], Optimizer]
    batch: Callable[[int, int], Batch]
    validation: tuple[Batch, ...]
    facts: dict[str, object]

    def lr(self, step: int) -> float:
        """Linear warm-up over a tenth of the steps, then a cosine down to a tenth of the peak."""
        n_warm = max(1, self.n_steps // 10)
        if step < n_warm:
            return self.peak_lr * (step + 1) / n_warm
        done = (step - n_warm) / max(1, self.n_steps - n_warm)
        return self.peak_lr * (0.55 + 0.45 * math.cos(math.pi * done))


def make_task(name: str, *, quick: bool, n_steps: int | None) -> Task:
    """Return the task of one of TASKS; n_steps None takes its own number of steps."""
    return {"cnn": _cnn, "gpt": _gpt, "vit": _vit, "mlp": _mlp}[name](quick, n_steps)


def _generator(seed: int, step: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed * 1_000_003 + step)


def _cnn(quick: bool, n_steps: int | None) -> Task:
    shape = CnnShape(channels=(8, 16)) if quick else CnnShape()
    facts: dict[str, object] = {"channels": list(shape.channels)}
    return _on_digits(
        "cnn", lambda: VggNet(shape), quick=quick, n_steps=n_steps, peak_lr=2e-3, facts=facts
    )


def _vit(quick: bool, n_steps: int | None) -> Task:
    shape = VitShape(n_layers=2, width=48) if quick else VitShape()
    facts: dict[str, object] = {
        "n_layers": shape.n_layers,
        "width": shape.width,
        "patch": shape.patch,
    }
    return _on_digits(
        "vit", lambda: Vit(shape), quick=quick, n_steps=n_steps, peak_lr=2e-3, facts=facts
    )


def _mlp(quick: bool, n_steps: int | None) -> Task:
    n_blocks = 2 if quick else 4
    return _on_digits(
        "mlp",
        lambda: SquaredReluMlp(n_blocks=n_blocks),
        quick=quick,
        n_steps=n_steps,
        peak_lr=1e-3,
        facts={"n_blocks": n_blocks, "width": 256, "activation": "squared ReLU"},
        batch_size=256,
    )


def _on_digits(
    name: str,
    build: Callable[[], Net],
    *,
    quick: bool,
    n_steps: int | None,
    peak_lr: float,
    facts: dict[str, object],
    batch_size: int = 64,
) -> Task:
    batch_size = 32 if quick else batch_size
    data = digits(CnnShape().side)

    def batch(seed: int, step: int) -> Batch:
        chosen = torch.randint(
            len(data.train_images), (batch_size,), generator=_generator(seed, step)
        )
        return data.train_images[chosen], data.train_labels[chosen]

    return Task(
        name=name,
        n_steps=n_steps or (6 if quick else 110),
        peak_lr=peak_lr,
        build=build,
        optimizer=lambda net: AdamW(net.parameters(), 0.0, weight_decay=0.05),
        batch=batch,
        validation=((data.validation_images, data.validation_labels),),
        facts={
            "data": "scikit-learn load_digits, 8x8 enlarged to 24x24 on 32x32 black",
            **facts,
            "batch": batch_size,
            "n_train": len(data.train_images),
            "n_validation": len(data.validation_images),
        },
    )


def _gpt(quick: bool, n_steps: int | None) -> Task:
    shape = GptShape(n_layers=2, width=64, context=64) if quick else GptShape()
    batch_size = 8
    text = python_sources()

    def batch(seed: int, step: int) -> Batch:
        last = len(text.train) - shape.context
        starts = torch.randint(last, (batch_size,), generator=_generator(seed, step))
        return windows(text.train, starts, shape.context)

    n_validation = 4 if quick else 6
    spread_out = torch.linspace(0, len(text.validation) - shape.context - 1, 16 * n_validation)
    return Task(
        name="gpt",
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
            "data": "top-level *.py of this Python's standard library, bytes",
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
