"""`BackwardOrder`: the order in which a backward is expected to ask for the tensors of slots."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.engine.replay.region import Region, RegionSlot

MOST_ORDERS: Final = 16
"""Backwards whose order is remembered, by the slot that each asks for first."""


class BackwardOrder:
    """Of one link: as in the last backward that began alike, else the newest first.

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

    def begin(self) -> None:
        """Another backward begins."""
        asked, known = self._asked, self._known
        if len(asked) > 1:
            known.pop(asked[0], None)
            known[asked[0]] = asked
            if len(known) > MOST_ORDERS:
                del known[next(iter(known))]
        for slot in self.slots:
            slot.turn = -1
        self._asked, self.slots, self.next = [], [], 0

    def expected(self, alive: list[Region]) -> list[RegionSlot]:
        """The order of a backward that has asked for none yet. Args: alive: the oldest first."""
        for first, order in reversed(self._known.items()):
            if first.region is not None and first.region.owner() is not None:
                return order
        return [region.slot for region in reversed(alive)]

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
