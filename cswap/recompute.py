"""Recomputation of whole modules through torch's checkpointing: by name, or by a plan."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from cswap.errors import ConfigError
from cswap.module_patch import ModulePatch, mark
from cswap.module_state import StateCheck
from cswap.second_forward import checkpointed, is_possible
from cswap.selectors import Selectors

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterable
    from contextlib import AbstractContextManager

    from cswap.schema.plan import Plan


def modules_to_recompute(plan: Plan, model: torch.nn.Module) -> dict[str, set[int]]:
    """The largest modules of which the plan recomputes all tensors, and those positions.

    An engine recomputes other tensors one by one, where it finds a short chain of operators that
    makes them; else it swaps them.
    """
    found: dict[str, set[int]] = {}
    for path, _ in model.named_modules():  # parents before children
        if not path or any(_within(path, outer) for outer in found):
            continue
        saved = {p: d for p, d in plan.decisions.items() if _within(d.module, path)}
        if saved and all(d.action == "recompute" for d in saved.values()):
            found[path] = set(saved)
    return found


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")


def modules_named(selectors: Collection[str | type], model: torch.nn.Module) -> tuple[str, ...]:
    """Paths of the submodules that the option ``recompute`` selects.

    Args:
        selectors: classes and globs. Of modules within each other, the outermost one counts.
        model: whose submodules.

    Raises:
        ConfigError: one of them selects nothing, or a scripted module.
    """
    chosen, found = Selectors(selectors), []
    modules = dict(model.named_modules())
    for path, module in modules.items():
        parents = (path[:n] for n, letter in enumerate(path) if letter == ".")
        if path and chosen.matches(path, module) and not any(p in found for p in parents):
            if isinstance(module, torch.jit.ScriptModule):
                raise ConfigError(
                    f"recompute: {path!r} is a scripted module, whose forward cannot be wrapped. "
                    "Name other modules."
                )
            found.append(path)
    for one in selectors:
        if not any(Selectors((one,)).matches(path, modules[path]) for path in modules if path):
            shown = getattr(one, "__name__", one)
            raise ConfigError(
                f"recompute={shown!r}: selects no submodule. Name classes or paths such as "
                f"{next((path for path in modules if path), 'blocks.*')!r}."
            )
    return tuple(found)


class Recomputed:
    """Modules that run under checkpointing until `remove` is called."""

    def __init__(
        self,
        model: torch.nn.Module,
        paths: Iterable[str],
        around: Callable[[torch.nn.Module], AbstractContextManager[object]],
    ) -> None:
        """Args: model: whose submodules; paths: of which; around: see `checkpointed`."""
        self._patches: list[ModulePatch] = []
        for path in paths:
            module = model.get_submodule(path)
            patch, check = ModulePatch(module), StateCheck(path, module)
            self._patches.append(patch)
            patch.set("forward", mark(partial(_forward, module.forward, module, check, around)))

    def remove(self) -> None:
        """Run the modules as before."""
        for patch in self._patches:
            patch.remove()
        self._patches.clear()


def _forward(
    plain: Callable[..., Any],
    module: torch.nn.Module,
    check: StateCheck,
    around: Callable[[torch.nn.Module], AbstractContextManager[object]],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not is_possible():
        return plain(*args, **kwargs)
    before = check.before()
    result = checkpointed(plain, module, around, *args, **kwargs)
    check.after(before)
    return result
