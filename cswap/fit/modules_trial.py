"""A plan that recomputes modules, against one that recomputes none: `ModulesTrial`.

Note [plans with modules]
~~~~~~~~~~~~~~~~~~~~~~~~~
The times of modules come from the explored steps alone, while those of tensors are measured in
steps that obey (way_times.py). So the two cannot be compared by their prices. The time of the steps
decides: a plan with modules gives way once to one without, if its steps take longer than the other
plan promises. When that one has come to rest, the plan whose steps took less time is obeyed.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING

from cswap.fit.goal_chooser import LOOK_EVERY

if TYPE_CHECKING:
    from cswap.fit.problem import FitPlan


class ModulesTrial:
    """The seconds of the steps that obey a plan, and those of the plan with modules."""

    def __init__(self) -> None:
        self._steps_s: deque[float] = deque(maxlen=LOOK_EVERY)
        self._before: tuple[FitPlan, float] | None = None
        self._is_over = False

    def begin_plan(self) -> None:
        """Another plan is obeyed from here on."""
        self._steps_s.clear()

    def note(self, step_s: float) -> None:
        """A step has obeyed. Args: step_s: of forward and backward; looked at as most of them."""
        self._steps_s.append(step_s)

    def leave(self, plan: FitPlan) -> float | None:
        """Seconds of a step of this plan, if one without modules is to be tried; else None.

        Args:
            plan: that is obeyed and recomputes modules.
        """
        if self._is_over or not self._has_many:
            return None
        self._is_over = True
        seconds = statistics.median(self._steps_s)
        self._before = plan, seconds
        return seconds

    def returns(self) -> tuple[FitPlan, float] | None:
        """The plan with modules and the seconds of its steps, if those of this plan take longer.

        The plan that is obeyed has come to rest, and recomputes no module.
        """
        if self._before is None or not self._has_many:
            return None
        before, self._before = self._before, None
        return before if statistics.median(self._steps_s) > before[1] else None

    def exceeds(self) -> None:
        """The plan with modules does not hold the limit: it is not obeyed again."""
        self._before = None

    @property
    def _has_many(self) -> bool:
        return len(self._steps_s) == LOOK_EVERY
