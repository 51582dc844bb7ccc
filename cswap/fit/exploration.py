"""The explored steps of a goal, from which its problem is posed: `Exploration`.

Note [chains that hide others]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Computed again, a tensor's inputs may be computed again, too, up to `GOAL_DEPTH` operators in a row,
over a link `LINK_DEPTH`.
While every tensor has its smallest form, a convolution that runs again hides ways of the tensors
after it. So, as far as the goal has room for them, such tensors are stored in the steps after the
first (`Problem.in_the_way`). A tensor has the ways that were found in any of these steps.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.fit.problem import OverLink, Problem

if TYPE_CHECKING:
    from cswap.fit.goal_chooser import GoalChooser
    from cswap.fit.saved import Key, Saved
    from cswap.fit.seen import Step

EXPLORED: Final = 3
"""Steps that are explored: in the first, kernels are compiled and chains are tried."""


class Exploration:
    """The explored steps of a model, until a problem is posed.

    Attributes:
        problem: of the fullest step but the first; None: there were too few.
        fullest: that step.
        plain_s: seconds of a step without cswap, at the most: on a GPU, its host was slow.
        n_empty: steps that saved nothing that could be held otherwise.
    """

    def __init__(self, chooser: GoalChooser) -> None:
        """Begin with the next step. Args: chooser: decides in these steps."""
        self.problem: Problem | None = None
        self.fullest: Step | None = None
        self.plain_s, self.n_empty = 0.0, 0
        self._chooser = chooser
        self._steps: list[Step] = []
        self._again: frozenset[Key] | None = None  # tensors that can be computed again, so far
        chooser.explore()

    def add(self, step: Step, room_bytes: float) -> None:
        """A step has ended. Args: step: it; room_bytes: that the goal leaves for saved tensors."""
        saved = self._chooser.saved(step)
        if not saved:
            self.n_empty += 1
            return
        self._steps.append(step)
        if len(self._steps) < EXPLORED:
            problem = Problem(saved, self._over_link(step, saved))
            self._chooser.stored = problem.in_the_way(room_bytes, self._again)
            self._again = problem.computed_again()
            return
        later = self._steps[1:]
        self.fullest = fullest = max(later, key=lambda step: step.raw_bytes)
        saved = self._chooser.saved(fullest)
        self.problem = Problem(saved, self._over_link(fullest, saved))
        self.plain_s = min(step.plain_s for step in later)
        self._steps.clear()

    def _over_link(self, step: Step, saved: list[Saved]) -> OverLink | None:
        link = self._chooser.link
        if link is None:
            return None
        other = step.other_bytes()
        least = other.min()
        for one in saved:  # in use, it was the program's
            other[one.first_use : one.last + 1] -= one.nbytes
        return OverLink(
            link,
            step.durations(),
            step.plain_s,
            step.host_ahead(),
            np.maximum(0.0, other - least),
        )
