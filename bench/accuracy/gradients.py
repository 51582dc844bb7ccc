"""How far gradients are off, by class of module, at the same weights on the same batch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any

import torch

import cswap
from bench.accuracy.train import POLICIES, gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from bench.workloads.small_models import Net
    from bench.workloads.tasks import Task


def errors(
    model: Net, task: Task, policies: Sequence[str], seed: int
) -> dict[str, dict[str, float]]:
    """By policy and class of module: relative error of its parameters' gradients, all together.

    ``||g - g_off|| / ||g_off||``. The second step is measured: the first one is the advisor's.
    """
    exact = _by_class(model, task, None, seed)
    found = {}
    for policy in policies:
        options = POLICIES[policy]
        if options is not None:
            mine = _by_class(model, task, options, seed)
            found[policy] = {
                kind: float((mine[kind] - exact[kind]).norm() / exact[kind].norm())
                for kind in exact
                if float(exact[kind].norm()) > 0
            }
    return found


def _by_class(
    model: Net, task: Task, options: dict[str, Any] | None, seed: int
) -> dict[str, torch.Tensor]:
    twin = copy.deepcopy(model)
    handle = None if options is None else cswap.install(twin, **options)
    for _ in range(2):
        twin.zero_grad()
        gradients(twin, task, seed, task.n_steps)
    if handle is not None:
        handle.remove()
    pieces: dict[str, list[torch.Tensor]] = {}
    for module in twin.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                kind = type(module).__name__
                pieces.setdefault(kind, []).append(parameter.grad.flatten().double())
    return {kind: torch.cat(grads) for kind, grads in pieces.items()}
