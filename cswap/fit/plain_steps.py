"""Steps without cswap, that say how long a plain step of a GPU takes: `PlainSteps`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.engine.engine import SwapEngine
    from cswap.fit.pace import Pace
    from cswap.fit.seen import Step

PLAIN_STEPS: Final = 2
"""Steps without cswap, of which the last is timed: in the first, torch's allocator makes blocks."""

MOST_PLAIN: Final = 6
"""The same, if none of them looks like a plain step: a program may pause, or have no backward."""

PLAIN_SHARE: Final = 0.8
"""Share of a GPU's usable memory that a step without cswap may be expected to take."""


class PlainSteps:
    """Takes the hooks off for some steps, and tells a pace how long these take."""

    def __init__(self, engine: SwapEngine, pace: Pace) -> None:
        """Args: engine: whose hooks go off; pace: is told."""
        self._engine, self._pace, self._n = engine, pace, 0

    def begin(self, peak_bytes: float, usable_bytes: int) -> bool:
        """The next steps are to run without cswap; whether there is room for that.

        Args:
            peak_bytes: expected of such a step.
            usable_bytes: that it could take.
        """
        if peak_bytes >= PLAIN_SHARE * usable_bytes:
            return False
        self._n = 0
        self._engine.sit_out(sits_out=True)
        return True

    def note(self, step: Step) -> bool:
        """One of them has ended; whether it was the last, so that the hooks are on again."""
        self._n += 1
        if self._n < PLAIN_STEPS:
            return False
        if not self._pace.note_plain(step.step_s) and self._n < MOST_PLAIN:
            return False
        self._engine.sit_out(sits_out=False)
        return True
