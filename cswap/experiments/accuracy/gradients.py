"""Errors of gradients by class of module, at the same weights on the same batch."""

from __future__ import annotations

import copy
from typing import TYPE_CHECKING, Any, Final

import torch

import cswap
from cswap.advisor.live_costs import REMAT, UNREAD
from cswap.codecs.registry import get_codec
from cswap.experiments.accuracy.train import POLICIES, gradients

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.experiments.task import Task

MOST_STEPS: Final = 8
"""A policy that has used no lossy codec after this number of steps has no error to report."""

Errors = dict[str, float]


def errors(
    model: torch.nn.Module, task: Task, policies: Sequence[str], seed: int
) -> dict[str, Errors | None]:
    """By policy and class of module: relative error of its parameters' gradients, all together.

    ``||g - g_off|| / ||g_off||``. None for a policy that did not use its lossy codec in
    `MOST_STEPS` steps: its gradients are exact, which says nothing about the codec.
    """
    exact = _by_class(model, task, None, seed)
    assert exact is not None
    found: dict[str, Errors | None] = {}
    for policy in policies:
        options = POLICIES[policy]
        if options is not None:
            mine = _by_class(model, task, options, seed)
            found[policy] = None if mine is None else _relative(mine, exact)
    return found


def _relative(mine: dict[str, torch.Tensor], exact: dict[str, torch.Tensor]) -> Errors:
    return {
        kind: float((mine[kind] - its).norm() / its.norm())
        for kind, its in exact.items()
        if float(its.norm()) > 0
    }


def _by_class(
    model: torch.nn.Module, task: Task, options: dict[str, Any] | None, seed: int
) -> dict[str, torch.Tensor] | None:
    # The gradients of the first step in which a lossy codec was used, from the second step on: in
    # the first one, the advisor has not seen the tensors yet.
    twin, exact = copy.deepcopy(model), options is None or "lossy" not in options
    handle = None if options is None else cswap.install(twin, **options)
    try:
        for step in range(MOST_STEPS):
            before = _lossy_bytes(handle)
            twin.zero_grad()
            gradients(twin, task, seed, task.n_steps)
            if step and (exact or _lossy_bytes(handle) > before):
                return _flat(twin)
    finally:
        if handle is not None:
            handle.remove()
    return None


def _lossy_bytes(handle: Any) -> float:
    # Raw bytes that lossy codecs have encoded so far; tensors computed again are exact.
    if handle is None:
        return 0.0
    handle.engine.synchronize()
    by_codec = handle.stats.by_codec
    codecs = {name: get_codec(name) for name in by_codec if name not in (REMAT, UNREAD)}
    return float(sum(by_codec[name].raw for name, c in codecs.items() if not c.lossless))


def _flat(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    pieces: dict[str, list[torch.Tensor]] = {}
    for module in model.modules():
        for parameter in module.parameters(recurse=False):
            if parameter.grad is not None:
                kind = type(module).__name__
                pieces.setdefault(kind, []).append(parameter.grad.flatten().double())
    return {kind: torch.cat(grads) for kind, grads in pieces.items()}
