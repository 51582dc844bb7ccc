"""Which parts of a plan an engine can follow.

An engine keeps, swaps with any codec, cuts into sections, and recomputes whole modules. It
recomputes a single tensor if it finds a short chain of operators that makes it, and swaps it
otherwise. It runs the operators in the model's own order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.schema.plan import Plan


def whole_modules(plan: Plan, paths: Iterable[str]) -> dict[str, set[int]]:
    """The largest modules of which the plan recomputes all tensors, and those positions.

    Args:
        plan: the plan.
        paths: paths of modules, parents before children; the root "" is left out.

    >>> from cswap.schema.plan import Decision, Plan
    >>> decisions = {0: Decision("recompute", module="a.b"), 1: Decision("keep", module="a.c")}
    >>> whole_modules(Plan(decisions), ["", "a", "a.b", "a.c"])
    {'a.b': {0}}
    """
    found: dict[str, set[int]] = {}
    for path in paths:
        if not path or any(_within(path, p) for p in found):
            continue
        saved = {p: d for p, d in plan.decisions.items() if _within(d.module, path)}
        if saved and all(d.action == "recompute" for d in saved.values()):
            found[path] = set(saved)
    return found


def obstacles(plan: Plan) -> list[str]:
    """The parts of a plan that no engine can follow, as texts; empty if there are none."""
    return ["an order of operators that is not the model's own"] if plan.order else []


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")
