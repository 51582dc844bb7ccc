"""The tasks of the accuracy experiment: each trains until its model has learned.

The models are the small ones of `bench.workloads.tasks`, trained for many more steps than there:
five seeds under six policies must fit into an hour of one core. The vision transformer has larger
patches and a larger width, so that it learns within its steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from bench.workloads.tasks import make_task, vit_facts
from bench.workloads.vision import Vit, VitShape

if TYPE_CHECKING:
    from cswap.experiments.task import Task

STEPS: Final = {"cnn": 150, "resnet": 300, "vit": 300, "gpt": 200}
"""Training steps by model. The losses of plain training show the learning in these steps."""

MARGINS: Final = {"cnn": 0.012, "resnet": 0.0058, "vit": 0.017, "gpt": 0.0051}
"""Nats of validation loss by task, at the task's own number of steps: the margin in
``bench/results/cpu/accuracy/pilot.json``."""

VIT: Final = VitShape(n_layers=2, width=64, patch=8)
"""A patch of the enlarged digits is 2.7 pixels of the original 8 x 8 ones wide."""


def make(name: str, *, n_steps: int | None = None) -> Task:
    """The task of one model of `STEPS`.

    Args:
        name: name of the model.
        n_steps: None takes the task's own number.
    """
    task = make_task(name, quick=True, n_steps=n_steps or STEPS[name])
    if name != "vit":
        return task
    return replace(task, build=lambda: Vit(VIT), facts={**task.facts, **vit_facts(VIT)})
