"""The next tensors of backward, kept from one unpack to the next.

Most unpacks come as predicted. Then the tensors ahead are those of the unpack before, without the
first and with one more at the end. A tensor whose swap-in has been begun is not looked at again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import weakref

    from cswap.engine.order.step_order import Saved, StepOrder

NO_STEP: Final = -1
"""Number of the step while no tensor has been asked for; steps count from 0."""


class Coming:
    """A tensor that is likely to be asked for soon.

    Attributes:
        owner: weak reference to what autograd holds of it.
        number: among those of its `Lookahead`, from 1.
        begun: whether its swap-in has been begun, or needs no beginning.
    """

    __slots__ = ("begun", "number", "owner")

    def __init__(self, owner: weakref.ref[Any], number: int) -> None:
        self.owner, self.number = owner, number
        self.begun = False


class Lookahead:
    """The tensors that follow the one that was asked for last. Used under the engine's lock."""

    def __init__(self, order: StepOrder) -> None:
        """Args: order: predicts what comes after a tensor."""
        self._order = order
        self._walked: set[int] = set()
        self._ahead: dict[int, Coming] = {}
        self._pending: deque[Coming] = deque()
        self.forget()

    def forget(self) -> None:
        """Predict anew from the next tensor: the order is another one, or memory was dropped."""
        self._step = NO_STEP
        self._last = self._n_asked = self._n_found = 0
        self._walked.clear()
        self._ahead.clear()
        self._pending.clear()

    def after(self, saved: Saved, count: int) -> tuple[int, list[Coming]]:
        """The next tensors whose swap-in has not been begun.

        Args:
            saved: is asked for now.
            count: of tensors to look ahead.

        Returns:
            The number of tensors that were asked for since the prediction began, and the tensors.
            How far one of them is ahead of ``saved`` is its own number minus that one.
        """
        position, ahead = saved.position, self._ahead
        if saved.step != self._step or position not in self._walked:
            self._begin(saved)
        elif position in ahead:
            if next(iter(ahead)) == position:
                asked = ahead.pop(position)
                self._n_asked = asked.number
                if not asked.begun:
                    self.begun(asked)
            else:  # another order than predicted
                self._begin(saved)
        # else: it is asked for once more, or it has no handle
        if len(ahead) < count:
            self._extend(count)
        return self._n_asked, list(self._pending)

    def begun(self, coming: Coming) -> None:
        """There is nothing left to be begun for this one."""
        if not coming.begun:
            coming.begun = True
            if coming in self._pending:  # else all was predicted anew meanwhile
                self._pending.remove(coming)

    def _begin(self, saved: Saved) -> None:
        self.forget()
        self._step, self._last = saved.step, saved.position
        self._walked.add(saved.position)

    def _extend(self, count: int) -> None:
        # Positions of tensors that were kept or shared are passed over: four for each, at most.
        for _ in range(4 * count):
            position = self._order.after(self._last)
            if position < 0 or position in self._walked:
                return
            self._last = position
            self._walked.add(position)
            owner = self._order.owner(self._step, position)
            if owner is None:
                continue
            self._n_found += 1
            self._ahead[position] = coming = Coming(owner, self._n_found)
            self._pending.append(coming)
            if len(self._ahead) >= count:
                return
