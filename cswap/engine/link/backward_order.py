"""`BackwardOrder`: the order in which a backward is expected to ask for tensors."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.engine.link.link_way import LinkWay, Region

MOST_ORDERS: Final = 16
"""Backwards whose order is remembered, by the way that each asks for first."""


class BackwardOrder:
    """Of one link: as in the last backward that began alike, else the newest first.

    A backward is expected to begin as the one that came last time after the one before it.
    Everything here is a guess. A wrong one costs time, never a wrong result.

    Attributes:
        ways: in order; each one's ``turn`` is its number here.
        next: number of the first one whose way back has not been begun.
    """

    def __init__(self) -> None:
        self.ways: list[LinkWay] = []
        self.next = 0
        self._known: dict[LinkWay, list[LinkWay]] = {}
        self._asked: list[LinkWay] = []  # in which this backward has asked
        self._last: LinkWay | None = None  # that the one before has asked for first
        self._next: dict[LinkWay | None, LinkWay] = {}  # by that, the next one's first

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
        for way in self.ways:
            way.turn = -1
        self._asked, self.ways, self.next = [], [], 0

    def expected(self, alive: list[Region]) -> list[LinkWay]:
        """The order of a backward that has asked for none yet. Args: alive: the oldest first."""
        first = self._next.get(self._last, self._last)
        # Ways that have been replaced have no region.
        found = None if first is None or first.region is None else self._known.get(first)
        return found or [region.way for region in reversed(alive)]

    def asks(self, way: LinkWay, alive: list[Region]) -> None:
        """Backward asks for a way's tensor, for the first time. Args: alive: the oldest first."""
        asked = self._asked
        if not asked:
            self.ways = self._known.get(way) or [r.way for r in reversed(alive)]
            for turn, other in enumerate(self.ways):
                other.turn = turn
        asked.append(way)
        if way.turn >= self.next:
            self.next = way.turn + 1
