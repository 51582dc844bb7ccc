"""Where the hooks are taken off and put back in a call of the model: `lay_out`, `Run`."""

from __future__ import annotations

import itertools
from collections import Counter
from typing import TYPE_CHECKING, Final

from cswap import hook_stack
from cswap.dynamo import leave_alone
from cswap.engine.recipes import Place
from cswap.quiet_modules.recording import Span

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.engine.engine import SwapEngine
    from cswap.engine.recipe import Recipe
    from cswap.engine.replay.slot import Slot
    from cswap.quiet_modules.recording import Boundary, Event, Pair, Record

LEAST_TENSORS: Final = 4
"""Fewest tensors of a span: to take the hooks off and to put them back takes some time."""


def lay_out(record: Record, slots: Sequence[Slot | Place | None], *, tells: bool = False) -> None:
    """Set the boundaries for the call that begins.

    Args:
        record: of a call like this one.
        slots: of `Replay.review`: they are of the last call, which may have been of another kind.
        tells: whether the hooks stay on where the last tensors are saved. Backward is likely to ask
            for these first, which tells that it has begun.
    """
    for event in record.events:
        event.boundary.reset()
    stay = [_stays(*pair) for pair in zip(record.places, slots, strict=False)]
    begins: Event | None = None
    events = _told_apart(record.events)
    saving = [a for a, b in itertools.pairwise(events) if b.n_saved > a.n_saved]
    last = saving[-1] if tells and saving else None
    for event, after in itertools.zip_longest(events, events[1:]):
        quiet = after is not None and event is not last and _is_quiet(event, after, stay)
        if begins is None:
            begins = event if quiet else None
        elif not quiet:
            _take_off(begins, event, slots)
            begins = None


def _told_apart(events: Sequence[Event]) -> list[Event]:
    # A boundary that comes twice in a call does not say which one it is.
    times = Counter(id(event.boundary) for event in events)
    found: list[Event] = []
    for event in events:
        if times[id(event.boundary)] == 1:
            found.append(event)
        elif not event.ours and found:
            found[-1] = found[-1]._replace(ours=False)
    return found


def _is_quiet(event: Event, after: Event, stay: Sequence[bool]) -> bool:
    # Whether all tensors stay between these two. stay: whether that of each place does.
    if not (event.ours and after.ours):
        return False
    # A backward inside of the call begins a step, whose places are counted from 0.
    first, end = event.place, after.place
    return first <= end <= len(stay) and all(stay[first:end])


def _stays(recorded: tuple[Recipe, int], slot: Slot | Place | None) -> bool:
    # Whether the tensor of a recorded place stays.
    return isinstance(slot, Place) and (slot.recipe, slot.nbytes) == recorded


def _take_off(begins: Event, ends: Event, slots: Sequence[Slot | Place | None]) -> None:
    # Between these two, if that is worth its time.
    if ends.n_saved - begins.n_saved < LEAST_TENSORS:
        return
    found = [slot for slot in slots[begins.place : ends.place] if isinstance(slot, Place)]
    begins.boundary.turn_off(Span(begins.place, found))
    ends.boundary.turn_on(ends.place)


class Run:
    """One call of the model, in its thread, with the hooks off in its spans."""

    records: Final = False

    def __init__(self, engine: SwapEngine, pair: Pair) -> None:
        """Args: engine: swaps; pair: the hooks."""
        self._engine, self._pair = engine, pair
        self._off = False

    @leave_alone
    def at(self, boundary: Boundary) -> None:
        """See `ModuleCalls`."""
        packer = self._engine.packer
        if self._off and boundary.wakes >= 0:
            if hook_stack.top(True) is not None:
                return  # somebody has put hooks there, and will take off the top ones
            self._off = False
            packer.book.go_to(boundary.wakes)
            hook_stack.push(self._pair.pack, self._engine.unpack)
        span = boundary.span
        if (
            span is not None
            and not self._off
            and packer.book.position == span.first
            and hook_stack.owner_of_top() is self._pair
        ):
            hook_stack.pop()
            self._off = True
            packer.pass_by(span.places)
