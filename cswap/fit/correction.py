"""The correction of a limit's next plan by a measured peak.

A peak above the limit tightens the next plan by the excess. One far below it loosens the next plan
by the error of the prediction. If the looser plan turns out to be too loose, the plan before it is
taken again, for good.
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
        self._held: tuple[FitPlan, float] | None = None

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
        return plan.peak_bytes + other + self.bias

    def too_much(self, look: Look) -> FitPlan | None:
        """After a peak above the limit: the plan to go back to; None: another is to be made."""
        held, self._held = self._held, None
        if held is not None and held[0] is not look.plan:
            self.rest()
            self._held = held
            self.bias = held[1]
            return held[0]
        predicted = self.predicted(look.plan, look.other)
        self.bias += look.measured - min(predicted, look.limit) + self.margin * look.room / 2
        self._made += 1
        return None

    def rest(self) -> None:
        """Loosen no plan any more."""
        self._made = MOST_LOOSENED

    def may_loosen(self, look: Look) -> bool:
        """After a peak within the limit: whether a plan of less time is to be made."""
        predicted = self.predicted(look.plan, look.other)
        self._held = look.plan, self.bias
        if (
            look.plan.added_s <= 0
            or self._made >= MOST_LOOSENED
            or look.limit - look.measured <= SLACK * look.room
            or look.measured >= predicted
        ):
            return False
        self._made += 1
        self.bias += look.measured - predicted
        return True
