"""A limit of the time that swapping adds to a CPU's step.

Note [the limit of a step's time]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
On a CPU no transfer is hidden: encoding, decoding and computing again all lengthen the step. The
price of a byte compares one tensor's time with its bytes. It says nothing of the sum of these
times. So the sum is measured. If it exceeds the limit, the tensors that save the fewest bytes for
a second stay, until the others fit into the limit. If it is far below, some of them leave again.

Predicted times are of warm caches, and too short by a factor that depends on the machine and the
model. The factor between the measured and the predicted sum corrects the sum for other tensors.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from cswap.advisor.price import STEPS

if TYPE_CHECKING:
    from cswap.config import SwapConfig

SLOWDOWN: Final = 1.1
"""Longest step over that without cswap, where nothing lossy is allowed and no option says more."""

LEAST_S: Final = 5e-3
"""Swapping may always take this long, in seconds: small models are slow for other reasons."""

MEASURED_SHARE: Final = 0.7
"""Share of the slowdown that is given to measured times. The hooks of modules, and kernels that
find the caches cold, take the rest."""

NEAR: Final = 0.8
"""Share of the limit from which all choices stay, so that they do not swing."""

CORRECTIONS: Final = (1.0, 10.0)
"""Smallest and largest factor between measured and predicted times: a pause must not count."""

MOST_TENSORS: Final = 1 << 14
"""Positions of a step that are remembered."""


class Gain(NamedTuple):
    """What one tensor's leaving takes and saves.

    Attributes:
        seconds: as predicted.
        nbytes: raw bytes less those held.
    """

    seconds: float
    nbytes: float


def decided_by(config: SwapConfig) -> str | None:
    """The first option that says what has to leave, so that no limit of time can; None: none."""
    for name in ("policy", "codec"):
        if getattr(config, name) != "auto":
            return name
    names = ("plan", "budget", "host_limit", "spill_dir")
    return next((name for name in names if getattr(config, name) is not None), None)


class Spent(NamedTuple):
    """Seconds of swapping since the first step.

    Attributes:
        leaving_s: for tensors that leave.
        staying_s: for tensors that stay.
        ended_s: monotonic time at which the last backward ended.
    """

    leaving_s: float
    staying_s: float
    ended_s: float


class TimeLimit:
    """Says which tensors of a step have to stay, so that swapping keeps a limit of its time."""

    def __init__(self, slowdown: float) -> None:
        """Args: slowdown: longest step over that without cswap, at least 1."""
        self._share = MEASURED_SHARE * (slowdown - 1)
        self._gains: dict[int, Gain] = {}  # by position; of tensors that are worth their time
        self._staying: set[int] = set()
        self._factor = 1.0  # measured over predicted seconds
        self._before: tuple[float, float, float] | None = None
        self._steps: deque[tuple[float, float, float]] = deque(maxlen=STEPS)

    @staticmethod
    def of(config: SwapConfig) -> TimeLimit | None:
        """The limit that the options ask for; None: the price of a byte alone decides.

        Where a lossy codec is allowed, bytes matter more than time, unless ``slowdown`` says so.
        """
        if config.fit is not None or decided_by(config) is not None:
            return None
        if config.slowdown is None and config.lossy != "off":
            return None
        return TimeLimit(config.slowdown or SLOWDOWN)

    def note(self, position: int, gain: Gain | None) -> None:
        """The tensor at this position of the step is worth its time by the price; None: it is not.

        Args:
            position: number of the saved tensor in the step.
            gain: of its cheapest way to leave.
        """
        if gain is None:
            self._gains.pop(position, None)
        elif len(self._gains) < MOST_TENSORS:
            self._gains[position] = gain

    def keeps(self, position: int) -> bool:
        """Whether the tensor at this position has to stay."""
        return position in self._staying

    def begin_step(self, now_s: float, spent: Spent) -> None:
        """A step begins.

        Args:
            now_s: monotonic time.
            spent: seconds of swapping since the first step.
        """
        if self._before is not None:
            # Up to the end of backward: what comes then may be the step of another model.
            began_s, leaving_s, staying_s = self._before
            if spent.ended_s > began_s:
                step_s = spent.ended_s - began_s
                self._steps.append(
                    (step_s, spent.leaving_s - leaving_s, spent.staying_s - staying_s)
                )
        self._before = now_s, spent.leaving_s, spent.staying_s

    def look_back(self) -> None:
        """Choose the tensors that have to stay by the steps before."""
        if not self._steps:
            return
        step_s, leaving_s, staying_s = map(statistics.median, zip(*self._steps, strict=True))
        limit_s = self._share * (step_s - leaving_s - staying_s) - staying_s
        limit_s = max(LEAST_S, limit_s)
        enough = leaving_s >= NEAR * limit_s or not self._staying
        if leaving_s <= limit_s and enough:
            return
        self._correct(leaving_s, falls=leaving_s <= limit_s)
        staying = self._beyond(limit_s / self._factor)
        if staying == self._staying:
            return
        self._staying = staying
        # These steps had other choices, and so has the one that begins now.
        self._steps.clear()
        self._before = None

    def _correct(self, leaving_s: float, *, falls: bool) -> None:
        gains = tuple(self._gains.items())  # another thread may note one meanwhile
        predicted_s = sum(g.seconds for n, g in gains if n not in self._staying)
        if not predicted_s:
            return
        low, high = CORRECTIONS
        factor = min(max(leaving_s / predicted_s, low), high)
        # Slowly down: tensors that may leave again do so only when their place has rested.
        self._factor = (self._factor + factor) / 2 if falls else factor

    def _beyond(self, limit_s: float) -> set[int]:
        # The positions beyond the limit, if those with the most bytes for a second come first.
        beyond, total_s = set(), 0.0
        for position, gain in sorted(self._gains.items(), key=_seconds_for_a_byte):
            if total_s + gain.seconds > limit_s:
                beyond.add(position)
            else:
                total_s += gain.seconds
        return beyond


def _seconds_for_a_byte(item: tuple[int, Gain]) -> float:
    gain = item[1]
    return gain.seconds / gain.nbytes
