"""Where the hooks are taken off and put back in a call of the model: `Spans`."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from cswap.engine.saved.rest import MOST_STEPS
from cswap.quiet_modules.stretch import Span
from cswap.stats.counters import SHARED

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from cswap.engine.packer import Packer
    from cswap.engine.recipes import Place
    from cswap.quiet_modules.stretch import Boundary, Saved, Stretch

LEAST_TENSORS: Final = 4
"""Fewest tensors of a span: to take the hooks off and to put them back takes some time."""


class Spans:
    """The spans of one model: they change when a tensor's rest ends, and when it begins again."""

    def __init__(self, packer: Packer) -> None:
        """Args: packer: of the engine that swaps."""
        self._packer = packer
        self._boundaries: Sequence[Boundary] = ()
        self._until = 0  # first step for which they have to be laid out anew
        self._limited: object = None  # the tensors that had to stay when they were laid out

    def learned(self, boundaries: Sequence[Boundary]) -> None:
        """Args: boundaries: of the last call that learned, in order."""
        called = set(map(id, boundaries))
        for boundary in self._boundaries:
            if id(boundary) not in called:
                boundary.forget()
        self._boundaries, self._until = boundaries, 0

    def forget(self) -> None:
        """The step has changed."""
        for boundary in self._boundaries:
            boundary.forget()
        self._boundaries = ()

    def lay_out(self) -> None:
        """Set the boundaries for the call that begins, in this thread."""
        step, limited = self._packer.step, self._packer.limited
        if step < self._until and limited is self._limited:
            return
        self._until, self._limited = step + MOST_STEPS, limited
        parts = _Parts()
        for boundary in self._boundaries:
            boundary.stay()
            stretch = boundary.stretch
            rests = None if stretch is None else self._rests_of(stretch)
            if stretch is None or rests is None:
                parts.end(boundary)
                parts = _Parts()
            else:
                parts.add(boundary, stretch, rests)
        parts.end(None)

    def _rests_of(self, stretch: Stretch) -> list[Place] | None:
        # The places of a stretch that rest in this step; None: one of them does not.
        packer, found = self._packer, []
        for number in stretch.resting:
            place = packer.book.place_at(number)
            if place is None or place.rest is None:  # it has left: the others are known
                return None
            if not packer.rests(place.rest):  # it is looked at, and may rest again
                self._until = packer.step + 1
                return None
            self._until = min(self._until, place.rest.until)
            found.append(place)
        return found


class _Parts:
    # Stretches in a row.

    def __init__(self) -> None:
        self._begins: Boundary | None = None
        self._first: Saved | None = None
        self._n_places = 0
        self._counts: Counter[str] = Counter()
        self._sizes: Counter[str] = Counter()
        self._resting: list[tuple[int, int]] = []

    def add(self, begins: Boundary, stretch: Stretch, rests: Iterable[Place]) -> None:
        if self._first is None:
            if not _may_begin(begins, stretch.saved):
                return
            self._begins, self._first = begins, stretch.saved
        self._n_places += stretch.saved.n_places
        for reason, (n, nbytes) in stretch.unseen:
            self._counts[reason] += n
            self._sizes[reason] += nbytes
        for place in rests:
            rest = place.rest
            assert rest is not None  # it rests
            reason = SHARED if place.shares else rest.reason
            self._counts[reason] += 1
            self._sizes[reason] += rest.limited[1]
            if not place.shares:
                self._resting.append(rest.limited)

    def end(self, ends: Boundary | None) -> None:
        # The hooks are off until there, if that is worth its time.
        first = self._first
        if self._begins is None or first is None or self._counts.total() < LEAST_TENSORS:
            return
        unseen = tuple((reason, (n, self._sizes[reason])) for reason, n in self._counts.items())
        span = Span(first, ends, self._n_places, unseen, tuple(self._resting))
        self._begins.turn_off(span)
        if ends is not None:
            ends.turn_on(first.first + self._n_places)


def _may_begin(begins: Boundary, saved: Saved) -> bool:
    # Where a module with others inside begins, its code may put hooks on top of ours first.
    is_leaf = begins.module_ends is None or begins.module_ends is saved.ends
    return is_leaf and saved.begins_with_a_tensor
