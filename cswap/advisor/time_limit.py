"""A limit of the time that swapping adds to a CPU's step.

Note [the limit of a step's time]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On a CPU no transfer is hidden: encoding, decoding and computing again all lengthen the step. The
price of a byte compares one tensor's time with its bytes. It says nothing of the sum of these
times. So the sum is measured, from the first tensor that a step saves to the end of its backward.
If it exceeds the limit, the tensors that save the fewest bytes for a second stay, until the others
fit into the limit. If it is far below, some of them leave again.

Note [predicted and measured times] in gains.py says how long one tensor takes. The factor between
the measured sum and that over all tensors corrects the rest. Nobody measures a tensor that stays,
and the machine may have been busy when it left last. So while there is room, its measured time
counts for less and less, until it leaves again. If it takes too long, it waits twice as long for
the next time.

Note [tensors that would leave for nothing]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Which tensors stay is decided by the step's peak: Note [the peak of a step] in step_peak.py. The
engine reports what it follows from (step_reports.py). Tensors whose leaving lowers no peak stay
even if there is time for them. Without such a report, where steps of several sizes take turns, and
where a forward begins before the backward of the last one, tensors leave in the order of bytes for
a second.

Note [the first tensors leave first]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Backward begins with the tensors that were saved last, when the most memory is held. One of these
that has left comes back at that moment, beside its encoding, so its leaving does not lower the
peak. One that was saved early is away for longer, and comes back when others have gone. So among
tensors that save about as many bytes for a second, those that were saved first leave first.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from cswap.advisor.gains import MOST_TENSORS, Gains
from cswap.advisor.price import STEPS
from cswap.advisor.step_peak import StepPeak, rate_of
from cswap.advisor.step_reports import LOOK_EVERY, StepReports

if TYPE_CHECKING:
    from cswap.advisor.gains import Gain, Key, Took
    from cswap.advisor.step_reports import Look
    from cswap.config import SwapConfig

SLOWDOWN: Final = 1.1
"""Longest step over that without cswap, where nothing lossy is allowed and no option says more."""

LOSSY_PATIENCE: Final = 2.0
"""Factor of the price of a byte with a lossy codec and without ``slowdown``: bytes matter more."""

LEAST_S: Final = 5e-3
"""Swapping may always take this long, in seconds: small models are slow for other reasons."""

MEASURED_SHARE: Final = 0.8
"""Share of the slowdown that swapping may take; the rest is for the noise of short measurements."""

UNSEEN_S: Final = 25e-6
"""Seconds of a saved tensor that no hook of ours sees: hooks of modules, torch's calls of hooks,
tensors that stay unlooked at, kernels of the model that find the caches cold. On seven models it
was 19 to 75 us: this is the part that all have, and what `MEASURED_SHARE` leaves has to do for the
rest."""

NEAR: Final = 0.85
"""Share of the limit from which all choices stay, so that they do not swing."""

FEWEST: Final = 3
"""Steps that are measured before a choice: the first ones after another choice take longer."""

CORRECTIONS: Final = (1.0, 10.0)
"""Smallest and largest factor between the measured and the expected sum: a pause must not count."""

MOST_PATIENCE: Final = 64
"""Most look-backs before tensors that had to stay may leave again."""

REST: Final = 4
"""Look-backs until the next choice, where there was room and the last one changed nothing: a choice
takes a millisecond."""

NO_TIME: Final = "slowdown"
NO_LOWER_PEAK: Final = "peak"
BY_LIMIT: Final = (NO_TIME, NO_LOWER_PEAK)
"""Reasons for which tensors stay that could leave, see `cswap.stats.keep_reasons`."""


def decided_by(config: SwapConfig) -> str | None:
    """The first option that decides which tensors leave, so that no limit does; None: none."""
    for name in ("policy", "codec"):
        if getattr(config, name) != "auto":
            return name
    names = ("plan", "budget", "host_limit", "spill_dir")
    return next((name for name in names if getattr(config, name) is not None), None)


def patience_of(config: SwapConfig) -> float:
    """Factor of the price of a byte, by ``slowdown`` and ``lossy``; at least 1.

    A user who allows swapping three times as much time as by default pays three times as much time
    for a byte. One who allows a lossy codec and says nothing of time pays `LOSSY_PATIENCE` times as
    much; an explicit ``slowdown`` counts alone.
    """
    if config.fit is not None:
        return 1.0
    if config.slowdown is None:
        return 1.0 if config.lossy == "off" else LOSSY_PATIENCE
    return max(1.0, (config.slowdown - 1) / (SLOWDOWN - 1))


class Moment(NamedTuple):
    """A moment, and the seconds of swapping until then.

    Attributes:
        at_s: monotonic time.
        leaving_s: in the hooks, for tensors that leave.
        staying_s: in the hooks, for tensors that stay.
        saved: number of tensors that were saved until then.
    """

    at_s: float
    leaving_s: float
    staying_s: float
    saved: int = 0


class TimeLimit:
    """Says which tensors of a step have to stay, so that swapping keeps a limit of its time.

    Not thread-safe: the advisor holds its lock, except for `keeps`, `took` and the reports.

    Attributes:
        staying: position and bytes of each tensor that has to stay.
        gains: of the tensors that could leave.
        took: times of those that have left.
        reports: of the engine.
    """

    def __init__(self, slowdown: float) -> None:
        """Args: slowdown: longest step over that without cswap, at least 1; infinite: no limit."""
        self._share = MEASURED_SHARE * (slowdown - 1)
        self.gains, self.reports = Gains(), StepReports()
        self.took: Took = deque(maxlen=MOST_TENSORS)
        self.staying: frozenset[Key] = frozenset()
        self._needless: frozenset[Key] = frozenset()  # of those, see `Choice`
        self._chosen_for: Look | None = None
        self._factor = 1.0  # the measured sum over the expected one
        self._patience = self._wait = 0  # look-backs before tensors may leave again
        self._began: Moment | None = None
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS)
        self._last_step_s = 0.0

    @staticmethod
    def of(config: SwapConfig) -> TimeLimit | None:
        """The limit that the options ask for; None: they say themselves what has to leave.

        Where a lossy codec is allowed, bytes matter more than time: without ``slowdown`` the limit
        is infinite.
        """
        if config.fit is not None or decided_by(config) is not None:
            return None
        if config.slowdown is None and config.lossy != "off":
            return TimeLimit(math.inf)
        return TimeLimit(config.slowdown or SLOWDOWN)

    def note(self, position: int, nbytes: int, gain: Gain | None) -> None:
        """A tensor is worth its time by the price; None: it is not.

        Args:
            position: number of the saved tensor in the step.
            nbytes: its bytes.
            gain: of its cheapest way to leave.
        """
        self.gains.note((position, nbytes), gain)

    def keeps(self, position: int, nbytes: int) -> bool:
        """Whether this tensor, which could leave now, has to stay."""
        key = position, nbytes
        self.gains.use(key)
        return key in self.staying

    def reason_of(self, position: int, nbytes: int) -> str:
        """Why such a tensor has to stay: one of `BY_LIMIT`."""
        return NO_LOWER_PEAK if (position, nbytes) in self._needless else NO_TIME

    def is_kept(self, position: int, nbytes: int) -> bool:
        """Whether such a tensor has to stay, when it comes."""
        return (position, nbytes) in self.staying

    def begin_step(self, begins: Moment, ended: Moment) -> None:
        """A step begins.

        Args:
            begins: now.
            ended: when the last backward ended. Later hooks may be of another model.
        """
        began, self._began = self._began, begins
        gains, reports = self.gains, self.reports
        reports.begin_step(gains)
        while self.took:
            position, nbytes, seconds = self.took.popleft()
            gains.took((position, nbytes), seconds)
        gains.step += 1
        reports.wanted = gains.step % LOOK_EVERY == 0 and bool(gains)  # no gains on a GPU
        if began is None:
            return
        if ended.at_s <= began.at_s and begins.leaving_s != began.leaving_s:
            self._forget_peak()
        self._measure(began, begins, ended)

    def _measure(self, began: Moment, begins: Moment, ended: Moment) -> None:
        if ended.at_s > began.at_s:
            at_s, leaving_s, staying_s, saved = (b - a for a, b in zip(began, ended, strict=True))
            self._last_step_s = max(at_s - leaving_s - staying_s, 0.0)
            others_s = staying_s + UNSEEN_S * saved
            self._steps.append((self._last_step_s, leaving_s, others_s))
        elif self._last_step_s and begins.leaving_s == began.leaving_s:
            # Backward is noticed where a tensor comes back. Here all of them stayed.
            others_s = begins.staying_s - began.staying_s + UNSEEN_S * (begins.saved - began.saved)
            self._steps.append((self._last_step_s, 0.0, others_s))

    def look_back(self) -> None:
        """Choose the tensors that have to stay by the steps before."""
        leaving_s, limit_s = 0.0, math.inf
        if not math.isinf(self._share):
            if len(self._steps) < FEWEST:
                return
            step_s, leaving_s, others_s = map(statistics.median, zip(*self._steps, strict=True))
            limit_s = max(LEAST_S, self._share * step_s - others_s)
        exceeds, look = leaving_s > limit_s, self.reports.look(self.gains, self.staying)
        has_room = self.staying != self._needless and leaving_s < NEAR * limit_s
        if exceeds or has_room:
            if not self._may_change(exceeds=exceeds):
                return
        elif look is None or not look.differs(self._chosen_for):
            return
        self.gains.forget_unused()
        if has_room:
            self.gains.doubt(self.staying, self._needless)
        self._correct(leaving_s, exceeds=exceeds)
        staying = self._choose(look, limit_s / self._factor)
        if staying != self.staying:
            self.staying = staying
            # The step that begins makes its choices anew, which takes time of its own.
            self._steps.clear()
            self._began = None
        elif has_room:
            self._wait = REST

    def forget(self) -> None:
        """No tensor has to stay, until steps are looked back at again."""
        self.gains.clear()
        self.reports.forget()
        self._steps.clear()
        self._chosen_for = None
        self.staying = self._needless = frozenset()

    def _forget_peak(self) -> None:
        # A forward begins before the backward of the last one: late tensors wait as long as early
        # ones. Those that stay for lack of time go on to do so.
        self.reports.distrust(self.gains.step)
        self._chosen_for = None
        self.staying -= self._needless
        self._needless = frozenset()

    def _may_change(self, *, exceeds: bool) -> bool:
        # Tensors that left again and took too long wait longer each time.
        if exceeds:
            self._wait = self._patience
            self._patience = min(2 * self._patience + 1, MOST_PATIENCE)
            return True
        self._wait -= 1
        return self._wait < 0

    def _correct(self, leaving_s: float, *, exceeds: bool) -> None:
        gains = self.gains.all()
        expected_s = sum(gain.expected_s for key, gain in gains if key not in self.staying)
        low, high = CORRECTIONS
        factor = min(max(leaving_s / expected_s, low), high) if expected_s else low
        # Slowly down: tensors that may leave again do so only in the next look.
        self._factor = factor if exceeds and expected_s else (self._factor + factor) / 2

    def _choose(self, look: Look | None, limit_s: float) -> frozenset[Key]:
        if look is None:
            self._needless, self._chosen_for = frozenset(), None
            return self._beyond(limit_s)
        self._chosen_for = look
        choice = StepPeak(look.held, look.leavers).within(limit_s)
        self._needless = frozenset(look.keys[n] for n in choice.needless)
        return frozenset(look.keys[n] for n in choice.staying)

    def _beyond(self, limit_s: float) -> frozenset[Key]:
        # Those that do not fit into the limit after those with more bytes for a second.
        beyond, total_s = [], 0.0
        for key, gain in sorted(self.gains.all(), key=_rank):
            if total_s + gain.expected_s > limit_s:
                beyond.append(key)
            else:
                total_s += gain.expected_s
        return frozenset(beyond)


def _rank(item: tuple[Key, Gain]) -> tuple[int, int]:
    # See Note [the first tensors leave first].
    (position, _), gain = item
    return rate_of(gain.expected_s, gain.nbytes), position
