"""The correction of a limit's next plan by a measured peak.

A peak above the limit tightens the next plan by the excess. One far below it loosens the next plan
by the error of the prediction. If a looser plan turns out to be too loose, one that has held the
limit is obeyed again, while one more is made, tighter than the looser one by its excess. If that is
too much as well, no other one is made.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from cswap.fit.problem import FitPlan

MARGIN: Final = 0.02
"""Share of the bytes for saved tensors that a plan leaves free, if an allocator's peak counts."""

COUNTED_MARGIN: Final = 0.005
"""The same where saved tensors are counted: then only the sizes of encodings change."""

SLACK: Final = 0.05
"""Share of them that may stay unused before a plan is loosened."""

MOST_LOOSENED: Final = 3
"""Corrections after which plans are tightened only, so that they come to rest."""


class Look(NamedTuple):
    """A step's peak, measured and expected.

    Attributes:
        plan: that the step obeyed.
        measured: its peak in bytes.
        limit: the goal in bytes.
        other: bytes of it that are no saved tensors', at every moment.
        besides: most of such bytes at a moment, beyond these.
    """

    plan: FitPlan
    measured: int
    limit: int
    other: float
    besides: float = 0.0

    @property
    def room(self) -> float:
        """Bytes that the limit leaves for saved tensors, where it leaves the fewest."""
        return max(self.limit - self.other - self.besides, 1.0)


class Correction:
    """The corrections of one goal.

    Attributes:
        margin: share of the bytes for saved tensors that plans leave free.
        bias: bytes by which measured peaks are above those of plans.
    """

    def __init__(self, margin: float) -> None:
        """Args: margin: see above."""
        self.margin = margin
        self.bias = 0.0
        self._made = 0
        self._held: list[tuple[FitPlan, float]] = []  # with the bias of its steps
        self._went_back = False

    def room(self, limit: int, other: float, besides: float = 0.0) -> float:
        """Bytes that a plan may take at a moment. Args: see `Look`."""
        room = limit - other
        return room - self.margin * max(0.0, room - besides) - self.bias

    def limit(self, room: float, other: float, besides: float = 0.0) -> int:
        """The smallest limit that leaves so many bytes: `room` the other way round."""
        room += self.bias
        if room > besides:
            room = (room - self.margin * besides) / (1 - self.margin)
        return math.ceil(room + other)

    def predicted(self, plan: FitPlan, other: float) -> float:
        """Peak in bytes of a step that obeys a plan. Args: other: see `Look`."""
        return plan.peak_bytes + other + self._bias_of(plan)

    def _bias_of(self, plan: FitPlan) -> float:
        # A curve knows the same plan with another time.
        known = (bias for one, bias in self._held if one.decided is plan.decided)
        return next(known, self.bias)

    @property
    def held(self) -> list[FitPlan]:
        """The plans whose steps have held the limit."""
        return [plan for plan, _ in self._held]

    def forget_held(self) -> None:
        """The next steps have larger tensors than these plans know."""
        self._held.clear()

    def too_much(self, look: Look) -> None:
        """After a peak above the limit: the next plan gets less room."""
        predicted = self.predicted(look.plan, look.other)
        excess = look.measured - min(predicted, look.limit) + self.margin * look.room / 2
        self.bias = self._bias_of(look.plan) + excess
        self._made += 1
        self._held = [one for one in self._held if one[0] is not look.plan]

    def go_back(self) -> bool:
        """One of `held` is obeyed again; whether one more plan is to be made besides."""
        self._made = MOST_LOOSENED
        again, self._went_back = not self._went_back, True
        return again

    def may_loosen(self, look: Look) -> bool:
        """After a peak within the limit: whether a plan of less time is to be made."""
        predicted, bias = self.predicted(look.plan, look.other), self._bias_of(look.plan)
        self._held = [one for one in self._held if one[0] is not look.plan]
        self._held.append((look.plan, bias))
        if (
            look.plan.added_s <= 0
            or self._made >= MOST_LOOSENED
            or look.limit - look.measured <= SLACK * look.room
            or look.measured >= predicted
        ):
            return False
        self._made += 1
        self.bias = bias + look.measured - predicted
        self._held[-1] = look.plan, self.bias
        return True
