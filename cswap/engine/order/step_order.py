"""The next tensors of backward: learned from the last step, last-in first-out before that.

Everything here is a guess. A wrong one costs a miss, never a wrong result: which tensor an unpack
gets is in its own packed view, and no state depends on forward and backward taking turns.
"""

from __future__ import annotations

import weakref
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, TypeAlias

if TYPE_CHECKING:
    from cswap.engine.saved.packed import Token
    from cswap.engine.saved.without_handle import WithoutHandle
    from cswap.engine.transfer.handle import Handle

    Saved: TypeAlias = Handle | WithoutHandle


MOST_CALLS: Final = 15
"""Calls of a model before a backward that are told apart."""

NO_BACKWARD: Final = -1
"""torch's number of the backward that runs, while none does."""


class StepOrder:
    """Positions of saved tensors in their step, and the order in which backward wants them.

    Attributes:
        step: number of the step.
        call: of the model, since backward has asked for a tensor; MOST_CALLS at the most.
        position: of the tensor that will be saved next.
        asked_since_pack: backward has asked for a tensor after the last one was saved: the next
            one that is saved begins a step.
        asked_step: step of the tensor that backward has asked for last.
        asked_positions: of the tensors of that step, in the order in which it has asked for them.
    """

    def __init__(self) -> None:
        self.step = self.call = 0
        self.position = 0
        self.asked_since_pack = False
        self._live: dict[tuple[int, int], weakref.ref[Any]] = {}
        self.asked_positions: list[int] = []
        self.asked_step = -1
        self._last: list[int] = []
        self._after: dict[int, int] | None = None

    def begin_step(self) -> None:
        """A forward begins: count positions from zero again."""
        if self.position:
            self.call = 0 if self.asked_since_pack else min(self.call + 1, MOST_CALLS)
            self.step += 1
            self.position = 0
        self.asked_since_pack = False

    def skip(self, n: int) -> int:
        """The next ``n`` tensors are saved without hooks; the position of the first."""
        position, _ = self.next_position()
        self.position += n - 1
        return position

    def next_position(self) -> tuple[int, int]:
        """Position of the tensor that is being saved, and number of its step.

        Saving after an unpack begins a step.
        """
        if self.asked_since_pack:
            self.begin_step()
        position = self.position
        self.position = position + 1
        return position, self.step

    def add(self, handle: Handle, token: Token) -> None:
        """A handle that may be asked for."""
        self._live[handle.step, handle.position] = weakref.ref(token)

    def discard(self, saved: Handle) -> None:
        """One that no longer can be."""
        self._live.pop((saved.step, saved.position), None)

    def live(self) -> list[Token]:
        """Owners of all tensors that may still be asked for."""
        return [owner for reference in self._live.values() if (owner := reference()) is not None]

    def asked(self, saved: Saved) -> None:
        """Backward has asked for this tensor (for the first time). Needs no lock."""
        self.asked_since_pack = True
        if saved.step != self.asked_step:
            if len(self.asked_positions) > 1:
                self._last, self._after = self.asked_positions, None
            self.asked_positions, self.asked_step = [], saved.step
        self.asked_positions.append(saved.position)

    def after(self, position: int) -> int:
        """The position that is likely to be asked for after this one; negative: none."""
        after = self._after
        if after is None:  # only those who decode ahead want to know
            last = self._last.copy()  # another thread may still ask for tensors of that step
            after = self._after = dict(pairwise(last))
        return after.get(position, position - 1)

    def owner(self, step: int, position: int) -> weakref.ref[Any] | None:
        """A weak reference to the owner at that position; None: nobody can ask for its tensor."""
        reference = self._live.get((step, position))
        return None if reference is None or reference() is None else reference
