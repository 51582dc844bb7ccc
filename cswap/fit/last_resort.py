"""The plans of the fewest bytes, each measured before a goal is refused: `LastResort`.

Note [the least memory is measured]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The prediction of a small plan is the least exact one: a tensor that is computed again needs its
inputs at once, and these were encoded, or are computed again themselves. Measured, the smallest
plan can be a third above its prediction, and above a plan that was predicted to be larger. So the
plans that are the smallest by several rules are obeyed in turn until one holds the limit, and the
one that was measured to be the smallest names the goal that can be reached.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from cswap.fit.problem import FitPlan

SAFETY: Final = 0.1
"""Share of the saved bytes by which the goal that is named is above the measured one."""


class LastResort:
    """The smallest plans of a problem, and the peaks of steps that obeyed them."""

    def __init__(self, plans: Iterable[FitPlan]) -> None:
        """Args: plans: in the order in which they are obeyed, until one holds the limit."""
        self._untried = list(plans)
        self._measured: list[tuple[FitPlan, int]] = []

    @property
    def smallest(self) -> tuple[FitPlan, int]:
        """The plan that was measured to be the smallest, and the peak of its steps in bytes."""
        return min(self._measured, key=lambda found: found[1])

    def next(self) -> FitPlan | None:
        """A plan that was not obeyed yet; None: all were."""
        return self._untried.pop(0) if self._untried else None

    def note(self, plan: FitPlan, measured: int) -> None:
        """Steps have obeyed a plan. Args: plan: it; measured: their peak so far, in bytes."""
        others = [found for found in self._measured if found[0] is not plan]
        self._measured = [*others, (plan, measured)]


def reachable(measured: int, other: float) -> int:
    """The goal that can be reached where a step was measured.

    Args:
        measured: its peak in bytes.
        other: bytes of it that are no saved tensors': these do not change.
    """
    return math.ceil(measured + SAFETY * max(measured - other, 0))
