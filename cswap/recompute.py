"""Recomputation by a plan: whole modules through torch's checkpointing."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from cswap.module_patch import ModulePatch, mark
from cswap.schema.executable import whole_modules
from cswap.second_forward import checkpointed_alone

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from cswap.schema.plan import Plan


def modules_to_recompute(plan: Plan, model: torch.nn.Module) -> dict[str, set[int]]:
    """The largest modules of which the plan recomputes all that they save, and those positions."""
    return whole_modules(plan, (path for path, _ in model.named_modules()))


class Recomputed:
    """Modules that run under checkpointing until `remove` is called."""

    def __init__(self, model: torch.nn.Module, paths: Iterable[str]) -> None:
        """Args: model: whose submodules; paths: of which."""
        self._patches = [ModulePatch(model.get_submodule(path)) for path in paths]
        for patch in self._patches:
            patch.set(
                "forward", mark(partial(checkpointed_alone, patch.module.forward, patch.module))
            )

    def remove(self) -> None:
        """Run the modules as before."""
        for patch in self._patches:
            patch.remove()
        self._patches.clear()
