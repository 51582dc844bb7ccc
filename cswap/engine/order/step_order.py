"""Positions of saved tensors in their step: `StepOrder`.

Everything that depends on them is a guess: which tensor an unpack gets is in its own packed view,
and no state depends on forward and backward taking turns.
"""

from __future__ import annotations

from typing import Final

MOST_CALLS: Final = 15
"""Calls of a model before a backward that are told apart."""

NO_BACKWARD: Final = -1
"""torch's number of the backward that runs, while none does."""


class StepOrder:
    """See the top.

    Attributes:
        step: number of the step.
        call: of the model, since backward has asked for a tensor; MOST_CALLS at the most.
        position: of the tensor that will be saved next.
        asked_since_pack: backward has asked for a tensor after the last one was saved: the next
            one that is saved begins a step.
    """

    def __init__(self) -> None:
        self.step = self.call = 0
        self.position = 0
        self.asked_since_pack = False

    def begin_step(self) -> None:
        """A forward begins: count positions from zero again."""
        if self.position:
            self.call = 0 if self.asked_since_pack else min(self.call + 1, MOST_CALLS)
            self.step += 1
            self.position = 0
        self.asked_since_pack = False

    def next_position(self) -> tuple[int, int]:
        """Position of the tensor that is being saved, and number of its step.

        Saving after an unpack begins a step.
        """
        if self.asked_since_pack:
            self.begin_step()
        position = self.position
        self.position = position + 1
        return position, self.step
