"""The time of a goal's steps, and the share of the allowed time for its next plan: `Pace`.

Note [a step's time and the plain one's]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A busy machine slows both down, so both are measured in the same steps. A step that is looked at
says how long it took without the hooks; its own time is longer than that of the others, which are
the steps that the slowdown is of. A GPU stands still while its host is in the hooks, and for a
while after them. So steps without cswap say how long that takes, where there is memory for them;
else it takes as long as the others less the time that the plan adds, at the most. They are repeated
before a plan gets more time or less: a machine may have become slower, or faster, since.

Where the steps are too slow, the next plan gets a smaller share of the time. Where they are fast
for a while, a larger one again. It is the median of the looks since the plan began that says so, by
more than its standard error: on a busy machine, single looks say anything. The share changes by as
much as the time that the steps took is off (`AIM`), and comes to rest near the smallest share that
was too much. Hooks of tensors that stay are
in no plan: so a smaller share lies between that by which the steps would be shorter in proportion
and that by which only the plan's own time would.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Final

from cswap.fit.seen import LEAST_TIMED

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.fit.seen import Step

TIMED: Final = {"cpu": 4, "cuda": 16}
"""Latest steps that are timed, by kind of device. On a CPU their median is the time of a step. On a
GPU it is their lower quartile: in some, the engine learns, which doubles the host's time."""

ALLOWED: Final = {"cpu": 0.75, "cuda": 1.0}
"""Share of the slowdown that steps may take by these times, by kind of device. On a CPU, caches
that the engine leaves cold slow the model as well, in the steps, too, that say how long a plain one
takes."""

TOO_SLOW: Final = 1.02
"""Share of that from which there is another plan, which takes some steps."""

FIRST_SHARE: Final = {"cpu": 0.5, "cuda": 1.0}
"""Of the allowed time, for the first plan, by kind of device: on a CPU, its prices are of warm
caches."""

LOOKS: Final = {"cpu": (3, 8), "cuda": (1, 1)}
"""Fewest and most looks at a step whose quotients with the steps before decide about the time of
the next plan, by kind of device: other programs disturb a CPU."""

ERROR: Final = 1.4826 * 1.2533
"""Standard error of a median, over the median of the distances from it and over the root of their
number: of normally distributed quotients."""

AIM: Final = 0.98
"""Share of the allowed time that the next plan is to take, by the time of the last one."""

MORE: Final = (1.15, 2.0)
"""Least and largest factor of the share for more time: another plan takes some slow steps, and
where no share was too much, time does not grow in proportion."""

FORGETS: Final = 1.002
"""Factor by which the share that was too much grows, each time that there is time left."""

NOT_PLAIN: Final = 0.3
"""Share of the time of an explored step without the hooks, below which no plain step is."""

LONGEST_PLAIN: Final = 1.1
"""The same, above which none is."""

LEAST_SHARE: Final = 0.1
"""Share of the allowed time below which plans get no less: cswap is not what makes steps slow."""

NEAR: Final = 0.85
"""Share of the slowdown that steps take at the most where a plan may get more time again."""


class Pace:
    """The seconds of forward and backward, with cswap and without. For one thread.

    Attributes:
        plain_s: without cswap; None: not known yet.
        was_plain: whether a step without cswap has said so.
        share: of the allowed time, for the next plan.
    """

    def __init__(self, kind: str) -> None:
        """Args: kind: of device, "cpu" or "cuda"."""
        self.plain_s: float | None = None
        self.was_plain = False
        self._added_s = 0.0
        self.share = FIRST_SHARE[kind]
        self._steps: deque[Step] = deque(maxlen=TIMED[kind])
        self._kind = kind
        self._too_much = math.inf  # the smallest share that was
        self._fine = 0.0  # the latest that was not
        # Of those and a plain step, since the plan began.
        self._quotients: deque[float] = deque(maxlen=LOOKS[kind][1])
        self._has_looked = False  # since the last decision
        self._is_timed = False  # a plain step, since the last decision

    @property
    def step_s(self) -> float | None:
        """Of the latest steps, see `TIMED`; None: there was none since the plan changed."""
        times = sorted(step.step_s for step in self._steps)
        if not times:
            return None
        return statistics.median(times) if self._kind == "cpu" else times[len(times) // 4]

    def note(self, step: Step, *, obeys: bool) -> None:
        """A step has ended. Args: step: it; obeys: whether by a plan."""
        if not step.looked or step.changed or not obeys:
            self._steps.append(step)  # a GPU may not have come to its end yet
        if step.looked and obeys and len(self._steps) >= LEAST_TIMED:
            took_s, plain_s = self.step_s or 0.0, step.plain_s
            if self._kind == "cuda":
                least_s, most_s = NOT_PLAIN * plain_s, min(plain_s, self.plain_s or plain_s)
                plain_s = max(least_s, min(most_s, took_s - self._added_s))
            if not self.was_plain:
                self.plain_s = max(plain_s, 1e-9)
            self._quotients.append(took_s / (self.plain_s or took_s))
            self._has_looked = True

    def note_plain(self, step_s: float) -> bool:
        """A step without cswap has ended; whether it counts.

        It may have had no backward, or a pause. So its time has to be near the one that is known:
        an explored step without the hooks takes no less time than a plain one, and not much more.
        Later, a step that obeys a plan takes no less.

        Args:
            step_s: its seconds.
        """
        known_s = self.plain_s or math.inf
        most_s = (self.step_s or math.inf) if self.was_plain else LONGEST_PLAIN * known_s
        if not NOT_PLAIN * known_s <= step_s <= most_s:
            return False
        self.plain_s, self.was_plain = step_s, True
        return True

    def plain_again(self) -> None:
        """Plain steps have run again: the latest steps are compared with them at once."""
        if self.plain_s and self.step_s:
            self._quotients.clear()
            self._quotients.append(self.step_s / self.plain_s)
            self._has_looked = self._is_timed = True

    def explore(self) -> None:
        """The next steps are explored: of their times, nothing is known."""
        self.share, self._too_much, self._fine = FIRST_SHARE[self._kind], math.inf, 0.0

    def begin_plan(self, added_s: float) -> None:
        """The next steps obey another plan. Args: added_s: seconds that it adds to a step."""
        self._added_s = added_s
        self._steps.clear()
        self._quotients.clear()
        self._has_looked = False

    def grow(self, factor: float) -> None:
        """The next plan is for steps that take so many times the seconds."""
        self.plain_s = factor * (self.plain_s or 0.0)

    def allowed_s(self, slowdown: float) -> float:
        """Seconds that the next plan may add to a step. Args: slowdown: see `changes`."""
        return self._allowed(slowdown) * (self.plain_s or 0.0) * self.share

    def _allowed(self, slowdown: float) -> float:
        # Over a plain step's time.
        return ALLOWED[self._kind] * (slowdown - 1)

    def changes(self, slowdown: float, time_plain: Callable[[], bool] = lambda: False) -> bool:
        """Decide about the share, once after each look; whether it has changed.

        Args:
            slowdown: longest step over that without cswap.
            time_plain: lets plain steps run first, if there is room; whether it does. Then
                `plain_again` is called.
        """
        if not self._has_looked or len(self._quotients) < LOOKS[self._kind][0]:
            return False
        is_timed, self._is_timed = self._is_timed or not self.was_plain, False
        self._has_looked = False
        took = statistics.median(self._quotients)
        distance = statistics.median(abs(one - took) for one in self._quotients)
        error = ERROR * distance / math.sqrt(len(self._quotients))
        allowed = self._allowed(slowdown)
        if not allowed:  # a plan that adds nothing is all that there is
            return False
        too_slow = 1 + TOO_SLOW * allowed
        if took - error > too_slow and self.share > LEAST_SHARE:
            if not is_timed and time_plain():
                return False
            self.share = max(LEAST_SHARE, self._less(allowed, took - error) * self.share)
            return True
        if took <= too_slow:
            self._fine = self.share
        if self.share < 1 and took + error < 1 + NEAR * allowed:
            more = self._more(allowed, took + error)
            if more >= MORE[0]:
                if not is_timed and time_plain():
                    return False
                self.share = min(1.0, more * self.share)
                return True
        return False

    def _less(self, allowed: float, took: float) -> float:
        # Factor of the share, where steps took so many times the plain one.
        self._too_much = min(self._too_much, self.share)
        fine, self._fine = self._fine, 0.0
        # Either the plan takes a multiple of its time, or something besides it takes some.
        too_long = (took - 1) / allowed
        less = (AIM / too_long + max(0.0, 1 - (too_long - AIM) / self.share)) / 2
        return max(less, fine / self.share) if fine < self.share else less

    def _more(self, allowed: float, took: float) -> float:
        most = MORE[1]
        if math.isfinite(self._too_much):
            most = (self.share + self._too_much) / 2 / self.share
        self._too_much *= FORGETS
        return min(most, AIM * allowed / max(took - 1, 1e-9))
