"""Recomputation by a plan: whole modules through torch's checkpointing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

from torch.utils.checkpoint import checkpoint

from cswap.module_patch import ModulePatch, mark

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from cswap.schema.plan import Plan


def modules_to_recompute(plan: Plan, model: torch.nn.Module) -> dict[str, set[int]]:
    """The largest modules of which the plan recomputes all that they save, and those positions.

    A module that saves one tensor that is to be recomputed and another that is not cannot be
    recomputed by itself: its tensors are left to the advisor.
    """
    found: dict[str, set[int]] = {}
    for path, _ in model.named_modules():
        inside = any(path == p or path.startswith(p + ".") for p in found)
        if not path or inside:
            continue
        saved = {p: d for p, d in plan.decisions.items() if _within(d.module, path)}
        if saved and all(d.action == "recompute" for d in saved.values()):
            found[path] = set(saved)
    return found


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")


class Recomputed:
    """Modules that run under checkpointing until `remove` is called."""

    def __init__(self, model: torch.nn.Module, paths: Iterable[str]) -> None:
        """Args: model: whose submodules; paths: of which."""
        self._patches = [ModulePatch(model.get_submodule(path)) for path in paths]
        for patch in self._patches:
            patch.set("forward", mark(partial(_checkpointed, patch.module.forward)))

    def remove(self) -> None:
        """Run the modules as before."""
        for patch in self._patches:
            patch.remove()
        self._patches.clear()


def _checkpointed(forward: Any, *args: Any, **kwargs: Any) -> Any:
    return checkpoint(forward, *args, use_reentrant=False, **kwargs)
