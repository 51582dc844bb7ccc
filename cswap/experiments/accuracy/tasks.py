"""The tasks of the accuracy experiment: each trains until its model has learned.

The models are the small ones of `cswap.experiments.workloads.tasks`, trained for many more steps
than there: five seeds under six policies must fit into an hour of one core. The vision transformer
has larger patches and a larger width, so that it learns within its steps.
"""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cswap.experiments.workloads.data import Images, digits
from cswap.experiments.workloads.small_models import CnnShape
from cswap.experiments.workloads.tasks import make_task
from cswap.experiments.workloads.vision import Vit, VitShape

if TYPE_CHECKING:
    from cswap.experiments.task import Task
    from cswap.experiments.workloads.data import Text

STEPS: Final = {"cnn": 150, "resnet": 300, "vit": 300, "gpt": 200}
"""Training steps by model. The losses of plain training show the learning in these steps."""

VIT: Final = VitShape(n_layers=2, width=64, patch=8)
"""A patch of the enlarged digits is 2.7 pixels of the original 8 x 8 ones wide."""


def make(name: str, *, quick: bool, n_steps: int | None, data: Images | Text | None = None) -> Task:
    """The task of one model of `STEPS`.

    Args:
        name: name of the model.
        quick: a few steps, in which nothing is learned.
        n_steps: None takes the task's own number.
        data: to train on; None takes the digits, or Python sources.

    Raises:
        ConfigError: the model does not take such data.
    """
    steps = n_steps if quick or n_steps is not None else STEPS[name]
    task = make_task(name, quick=True, n_steps=steps, data=data)
    return task if name != "vit" else _with_larger_patches(task, data)


def _with_larger_patches(task: Task, data: Images | Text | None) -> Task:
    images = data if isinstance(data, Images) else digits(CnnShape().side)
    shape = replace(VIT, side=images.side, colours=images.channels)
    facts = {
        **task.facts,
        "n_layers": shape.n_layers,
        "width": shape.width,
        "patch": shape.patch,
    }
    return replace(task, build=lambda: Vit(shape, images.n_classes), facts=facts)
