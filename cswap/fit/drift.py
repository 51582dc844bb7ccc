"""Whether steps have drifted from the plan that they obey: `Drift`."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from cswap.fit.goal_chooser import LOOK_EVERY

if TYPE_CHECKING:
    from cswap.fit.problem import FitPlan
    from cswap.fit.seen import Step

DRIFT: Final = 0.05
"""Share of a step's raw bytes in tensors that the plan does not know, from which it is drift; also
the share that is missing in `LOOK_EVERY` equal steps in a row."""


class Drift:
    """Compares the steps that were looked at with their plan."""

    def __init__(self) -> None:
        self._raw_bytes: deque[int] = deque(maxlen=LOOK_EVERY)  # that the plan knows, in a step

    def begin_plan(self) -> None:
        """The next steps obey another plan."""
        self._raw_bytes.clear()

    def in_step(self, step: Step, plan: FitPlan) -> bool:
        """Whether a step has drifted. Args: step: that was looked at; plan: that it obeyed."""
        if step.changed:  # sizes vary
            self._raw_bytes.clear()
        self._raw_bytes.append(step.raw_bytes - step.unknown_bytes)
        smaller = len(self._raw_bytes) == LOOK_EVERY
        smaller = smaller and max(self._raw_bytes) < (1 - DRIFT) * plan.raw_bytes
        return smaller or step.unknown_bytes > DRIFT * max(plan.raw_bytes, 1)
