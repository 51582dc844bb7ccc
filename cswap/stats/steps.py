"""Bytes of the last step's saved tensors, out of counts that only grow: `Steps`.

Note [with cswap and without]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Without cswap, a step holds each memory that it saves until backward. So that is a sum: of all
tensors that have left, in raw bytes, and of all that have stayed. With cswap, the bytes that the
engine holds have a maximum, and those come on top of it for whose end nobody waits. They are there
at the end of the forward, where most steps have their peak. Both hold nothing of parameters.

Tensors without a handle that stay are counted wherever they are saved, so one that is saved twice
counts twice, in both figures. Under a goal these may be most of a step. There, a step that is
looked at tells which are saved for the first time, and other steps have the same share of them.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final, NamedTuple, TypeAlias

if TYPE_CHECKING:
    from collections.abc import Mapping

Kept: TypeAlias = dict[str, tuple[int, int]]
"""Number and bytes of tensors that stay, by reason."""

RECENT: Final = 16
"""Steps of `Steps.recent_peak_bytes`."""

PARAMETER: Final = "parameter"
"""Reason of tensors that no step holds: they are there anyway."""

BY_GOAL: Final = "goal"
"""Reason of tensors that stay by a goal's plan."""

NONE: Final = (0, 0)


class Totals(NamedTuple):
    """Counts since the engine was made.

    Attributes:
        raw_bytes: of the tensors that left.
        gained_bytes: see `gained_bytes` in stats.py.
        encoded_bytes: of the encodings.
        once: the tensors that stay, each memory once.
        by_save: others that stay, counted wherever they were saved.
        early: those that stay, and have been counted as gone.
    """

    raw_bytes: int = 0
    gained_bytes: int = 0
    encoded_bytes: int = 0
    once: Kept = {}  # noqa: RUF012 - nobody writes into it
    by_save: Kept = {}  # noqa: RUF012
    early: Kept = {}  # noqa: RUF012


@dataclass(frozen=True, slots=True)
class StepFigures:
    """Bytes of the saved tensors of one step. See Note [with cswap and without].

    Attributes:
        peak_bytes: most bytes that they held at a time.
        plain_bytes: that they hold without cswap.
        gained_bytes: see `Stats.step_gained_bytes`.
        encoded_bytes: of their encodings.
        kept: those that stayed, but for parameters.
    """

    peak_bytes: int = 0
    plain_bytes: int = 0
    gained_bytes: int = 0
    encoded_bytes: int = 0
    kept: Kept = field(default_factory=dict)


class Steps:
    """The steps of one engine; used under the lock of its `Counters`.

    A step begins with a forward, after a backward, and ends where the next one begins: several
    forwards may come before a backward, and several backwards after it.

    Attributes:
        n: number of those whose backward has begun.
        peak_bytes: most bytes that the engine has held in this one.
        stayed_bytes: of the tensors among `Totals.once` that are not among the bytes held.
        goal_once_bytes: of the tensors that stay by a goal's plan, each memory once, if the step is
            looked at; else 0.
    """

    def __init__(self) -> None:
        """No step has begun."""
        self.n = self.peak_bytes = self.stayed_bytes = self.goal_once_bytes = 0
        self._begun, self._last = Totals(), StepFigures()
        self._has_backward = False
        self._recent: deque[int] = deque(maxlen=RECENT)
        self._goal_share = 1.0

    def begin(self, totals: Totals, held_bytes: int) -> None:
        """A forward begins. Args: totals: by now; held_bytes: by the engine, now."""
        if self._has_backward:
            self._last = self._step(totals)
            self._recent.append(self._last.peak_bytes)
        elif held_bytes:  # a forward has come before, and no backward yet
            return
        self._has_backward = False
        self._begun, self.peak_bytes = totals, held_bytes
        self.stayed_bytes = self.goal_once_bytes = 0

    def begin_backward(self) -> None:
        """A backward begins."""
        if not self._has_backward:
            self._has_backward = True
            self.n += 1

    def last(self, totals: Totals) -> tuple[StepFigures, int]:
        """The last step whose backward has begun, and the highest peak of the last steps."""
        if not self._has_backward:
            return self._last, max(self._recent, default=0)
        found = self._step(totals)
        return found, max([*self._recent, found.peak_bytes][-RECENT:])

    def _step(self, totals: Totals) -> StepFigures:
        begun = self._begun
        once, by_save = since(begun.once, totals.once), since(begun.by_save, totals.by_save)
        by_save.pop(PARAMETER, None)
        n_by_goal, goal_bytes = by_save.get(BY_GOAL, NONE)
        if n_by_goal:
            if self.goal_once_bytes:
                self._goal_share = self.goal_once_bytes / goal_bytes
            by_save[BY_GOAL] = n_by_goal, round(self._goal_share * goal_bytes)
        still_bytes = bytes_of(by_save)
        return StepFigures(
            self.peak_bytes + self.stayed_bytes + still_bytes,
            totals.raw_bytes - begun.raw_bytes + bytes_of(once) + still_bytes,
            totals.gained_bytes - begun.gained_bytes,
            totals.encoded_bytes - begun.encoded_bytes,
            together(once, by_save, since(begun.early, totals.early)),
        )


def since(before: Mapping[str, tuple[int, int]], now: Kept) -> Kept:
    """Number and bytes, by reason, that were counted in between."""
    found = {}
    for reason, (n, nbytes) in now.items():
        n_before, bytes_before = before.get(reason, NONE)
        if n != n_before or nbytes != bytes_before:
            found[reason] = n - n_before, nbytes - bytes_before
    return found


def together(*parts: Mapping[str, tuple[int, int]]) -> Kept:
    """Sums by reason, of those that have any."""
    found: Kept = {}
    for part in parts:
        for reason, (n, nbytes) in part.items():
            n_before, bytes_before = found.get(reason, NONE)
            found[reason] = n_before + n, bytes_before + nbytes
    return {reason: counted for reason, counted in found.items() if counted[0]}


def bytes_of(kept: Kept) -> int:
    """The sum of the bytes."""
    return sum(nbytes for _, nbytes in kept.values())
