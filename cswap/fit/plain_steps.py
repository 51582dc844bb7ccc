"""Steps without cswap, that say how long a plain step of a GPU takes: `PlainSteps`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.fit.marked_step import MarkedStep

if TYPE_CHECKING:
    from cswap.devices.stopwatch import Stopwatch
    from cswap.engine.engine import SwapEngine
    from cswap.fit.pace import Pace
    from cswap.fit.problem import Times
    from cswap.fit.seen import Step

PLAIN_STEPS: Final = 2
"""Steps without cswap, of which the last is timed: in the first, torch's allocator makes blocks."""

MOST_PLAIN: Final = 6
"""All of these steps, where some do not look like plain ones: a program may pause, or have no
backward."""

LONGEST_MARKED: Final = 1.5
"""Most seconds of a marked step over a plain one: marks take time where the host is not ahead. A
longer one had a pause."""

PLAIN_SHARE: Final = 0.9
"""Share of a GPU's usable memory that a step without cswap may be expected to take."""


class PlainSteps:
    """Takes the hooks off for some steps, and tells a pace how long these take.

    After the first ones, one step has hooks that mark its times (marked_step.py).

    Attributes:
        times: of a plain step, at the moments of the explored one; None: not known.
        run: whether these steps run.
    """

    def __init__(self, engine: SwapEngine, pace: Pace, watch: Stopwatch) -> None:
        """Args: engine: whose hooks go off; pace: is told; watch: of the device."""
        self._engine, self._pace, self._watch, self._n = engine, pace, watch, 0
        self.run = False
        self._explored: Step | None = None
        self._marked: MarkedStep | None = None
        self.times: Times | None = None

    def begin(self, peak_bytes: float, usable_bytes: int, explored: Step | None = None) -> bool:
        """The next steps are to run without cswap; whether there is room for that.

        Args:
            peak_bytes: expected of such a step.
            usable_bytes: that it could take.
            explored: a step before them, whose moments are to be timed; None: they have been.
        """
        if peak_bytes >= PLAIN_SHARE * usable_bytes:
            return False
        self._n, self._explored, self.run = 0, explored, True
        if explored is not None:
            self.times = None
        self._engine.sits_out = True
        return True

    def note(self, step: Step) -> bool:
        """One of them has ended; whether it was the last, so that the hooks are on again."""
        if not self.run:  # an interrupt came where they ended
            return True
        self._n += 1
        if self._marked is not None and self._explored is not None:
            plain_s = self._pace.plain_s or 0.0
            times = self._marked.times(self._explored, step, plain_s)
            if times is not None and times.step_s <= LONGEST_MARKED * plain_s:
                self.times = times
        elif self._n < PLAIN_STEPS:
            return False
        elif not self._pace.note_plain(step.step_s):
            if self._n < MOST_PLAIN:
                return False
            self.end()
            return True
        if self._explored is not None and self.times is None and self._n < MOST_PLAIN:
            self._mark()
            return False
        self.end()
        return True

    def _mark(self) -> None:
        # The next step.
        if self._marked is not None:
            self._marked.stop()
        self._engine.sits_out = False
        self._engine.stand_in = self._marked = MarkedStep(self._engine, self._watch)

    def end(self) -> None:
        """The hooks are on from the next step on."""
        self._engine.sits_out, self._engine.stand_in, self.run = False, None, False
        if self._marked is not None:
            self._marked.stop()
        self._explored = self._marked = None
