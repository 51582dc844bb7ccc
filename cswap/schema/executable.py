"""Which parts of a plan an engine can follow.

An engine keeps, swaps with any codec, cuts into sections, and recomputes whole modules. It cannot
recompute single tensors on a plan's word, and it runs the operators in the model's own order.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.schema.plan import Plan

MOST_NAMED: Final = 8
"""Largest number of tensors that a text names."""


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


def obstacles(plan: Plan, recomputed: Iterable[int] | None = None) -> list[str]:
    """The parts of a plan that no engine can follow, as texts; empty if there are none.

    Args:
        plan: the plan.
        recomputed: positions that recomputed modules cover; None: those of all whole modules that
            the plan names.
    """
    if recomputed is None:
        paths = sorted({path for d in plan.decisions.values() for path in _parents(d.module)})
        recomputed = [p for positions in whole_modules(plan, paths).values() for p in positions]
    covered = set(recomputed)
    single = [
        f"{position} ({decision.module})" if decision.module else str(position)
        for position, decision in sorted(plan.decisions.items())
        if decision.action == "recompute" and position not in covered
    ]
    texts = []
    if single:
        more = f" and {len(single) - MOST_NAMED} more" if len(single) > MOST_NAMED else ""
        named = ", ".join(single[:MOST_NAMED])
        texts.append(f"tensors recomputed outside of whole modules: {named}{more}")
    if plan.order:
        texts.append("an order of operators that is not the model's own")
    return texts


def _within(module: str, path: str) -> bool:
    return module == path or module.startswith(path + ".")


def _parents(module: str) -> list[str]:
    parts = module.split(".")
    return [".".join(parts[: n + 1]) for n in range(len(parts))]
