"""Measured seconds that plans add to a step: `PlanCosts`."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.fit.goal_chooser import GoalChooser
    from cswap.fit.pace import Pace
    from cswap.fit.problem import FitPlan, Problem


class PlanCosts:
    """Of the plans of one goal. On a CPU tensors are timed; a GPU's steps are timed whole.

    Attributes:
        priced: the problem at the prices that predict the time of the plan that is obeyed; None:
            there is no such plan.
        obeyed_s: seconds that this plan adds, as measured; None: not yet.
    """

    def __init__(self, chooser: GoalChooser, pace: Pace) -> None:
        """Args: chooser: times tensors; pace: times steps."""
        self._chooser, self._pace = chooser, pace
        self.forget()

    def forget(self) -> None:
        """The next steps save other tensors."""
        self.priced: Problem | None = None
        self.obeyed_s: float | None = None
        self._steps_s: list[tuple[FitPlan, float]] = []  # of a GPU, that obeyed these plans

    def repriced(self, problem: Problem) -> Problem:
        """The problem with measured times; the same one if there is none."""
        return self._chooser.times.repriced(problem) or problem

    def note(self, plan: FitPlan, problem: Problem) -> bool:
        """Steps obey a plan; whether the seconds that it adds are known."""
        if self._chooser.unified:
            return self.repriced(problem) is not problem
        step_s = self._pace.step_s
        if step_s is not None:
            self._steps_s.append((plan, step_s))
        return step_s is not None

    def of(self, plan: FitPlan, problem: Problem) -> float:
        """Measured seconds that a plan adds."""
        if self._chooser.unified:
            return self.repriced(problem).added_s(plan)
        steps_s = [step_s for one, step_s in self._steps_s if one is plan]
        return min(steps_s, default=math.inf) - (self._pace.plain_s or 0.0)

    def measure(self, plan: FitPlan, problem: Problem) -> float:
        """The same; the time of this plan is predicted by measured ones from now on."""
        if self._chooser.unified:
            self.priced = self.repriced(problem)
        self.obeyed_s = self.of(plan, problem)
        return self.obeyed_s
