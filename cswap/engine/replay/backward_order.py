"""`BackwardOrder`: the order in which a backward is expected to ask for the tensors of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.engine.replay.region import Region, RegionSlot

MOST_ORDERS: Final = 16
"""Backwards whose order is remembered, by the slot that each asks for first."""


class BackwardOrder:
    """Of one link: as in the last backward that began alike, else the newest first.

    A backward is expected to begin as the one that came last time after the one before it.
    Everything here is a guess. A wrong one costs time, never a wrong result.

    Attributes:
        slots: in order; each one's ``turn`` is its number here.
        next: number of the first one whose way back has not been begun.
    """

    def __init__(self) -> None:
        self.slots: list[RegionSlot] = []
        self.next = 0
        self._known: dict[RegionSlot, list[RegionSlot]] = {}
        self._asked: list[RegionSlot] = []  # in which this backward has asked
        self._last: RegionSlot | None = None  # that the one before has asked for first
        self._next: dict[RegionSlot | None, RegionSlot] = {}  # by that, the next one's first

    def begin(self) -> None:
        """Another backward begins."""
        asked, known = self._asked, self._known
        if len(asked) > 1:
            first = asked[0]
            known.pop(first, None)
            known[first] = asked
            self._next[self._last], self._last = first, first
            if len(known) > MOST_ORDERS:
                oldest = next(iter(known))
                del known[oldest]
                self._next.pop(oldest, None)
        for slot in self.slots:
            slot.turn = -1
        self._asked, self.slots, self.next = [], [], 0

    def expected(self, alive: list[Region]) -> list[RegionSlot]:
        """The order of a backward that has asked for none yet. Args: alive: the oldest first."""
        first = self._next.get(self._last, self._last)
        # Slots that have been replaced have no region.
        found = None if first is None or first.region is None else self._known.get(first)
        return found or [region.slot for region in reversed(alive)]

    def asks(self, slot: RegionSlot, alive: list[Region]) -> None:
        """Backward asks for a slot's tensor, for the first time. Args: alive: the oldest first."""
        asked = self._asked
        if not asked:
            self.slots = self._known.get(slot) or [r.slot for r in reversed(alive)]
            for turn, other in enumerate(self.slots):
                other.turn = turn
        asked.append(slot)
        if slot.turn >= self.next:
            self.next = slot.turn + 1
