"""Online correction: what was measured, over what was predicted.

Note [device and codec]
~~~~~~~~~~~~~~~~~~~~~~~
Only codecs that are used are measured. Were each corrected alone, then a machine that is busier
than when it was calibrated would make the codec in use look slow and all others fast, and the
advisor would run from one to the next. So there is a correction for the device, learned from all of
them, and a factor per codec on top. That of the device is a line, ``overhead + slope * predicted``:
a round trip amid training meets cold caches and new pages, which is a constant that small tensors
would otherwise turn into a factor of large ones.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from cswap.log import log

WEIGHT: Final = 0.2
"""Of the newest measurement in the moving average."""

CLIP: Final = 0.5
"""Of the logarithm: one outlier moves the average by no more than WEIGHT * CLIP, 10 %."""

CHANGE: Final = 3
"""Measurements in a row that are off by CLIP or more, on one side: a change, no outlier."""

FORGET: Final = 0.96
"""Of what is not measured, that is left of a correction after some steps: half after 17 times."""

ABSURD: Final = 1e4
"""A measurement this many times off is the clock's or the counter's fault."""

LIMIT: Final = math.log(64)

FADE: Final = 0.97
"""Of a measurement of the device, that is left when the next one comes."""

LEAST_SLOPE: Final = 1 / 64

PRIOR: Final = 4
"""Measurements, of jobs of 0.1 ms and of 1 ms by turns, that the device's line starts with."""

_PRIOR_SUMS: Final = tuple(
    PRIOR / 2 * sum(term(x) for x in (1e-4, 1e-3))
    for term in (
        lambda x: 1 / x**2,
        lambda x: 1 / x,
        lambda _: 1.0,
        lambda x: 1 / x,
        lambda _: 1.0,
    )
)
"""Weight, and weighted x, x**2, y and x * y, for y = x and weights 1 / x**2."""

_warned = False


def usable(predicted: float, measured: float) -> bool:
    """Whether a measurement can be true; says so once if one cannot."""
    global _warned
    if measured > 0 and predicted > 0 and 1 / ABSURD < measured / predicted < ABSURD:
        return True
    if not _warned:
        _warned = True
        log.warning(
            "A measured value of %g where %g was expected cannot be; such values are ignored.",
            measured,
            predicted,
        )
    return False


class Correction:
    """Moving average of log(measured / predicted), which follows a change at once."""

    __slots__ = ("_fresh", "_log", "_off", "count")

    def __init__(self) -> None:
        self._log = 0.0
        self._fresh = False
        self._off: deque[float] = deque(maxlen=CHANGE)
        self.count = 0

    @property
    def factor(self) -> float:
        """To multiply predictions with."""
        return math.exp(self._log)

    def observe(self, predicted: float, measured: float) -> None:
        """Take in one measurement; both in the same unit, and `usable`."""
        found = math.log(measured / predicted)
        error = found - self._log
        self.count += 1
        self._fresh = True
        if abs(error) < CLIP:
            self._off.clear()
        else:
            if self._off and (self._off[-1] - self._log) * error < 0:
                self._off.clear()
            self._off.append(found)
        if len(self._off) == CHANGE:
            self._log = sorted(self._off)[CHANGE // 2]
            self._off.clear()
        else:
            self._log += WEIGHT * max(-CLIP, min(CLIP, error))
        self._log = max(-LIMIT, min(LIMIT, self._log))

    def forget(self) -> None:
        """Forget a little, if nothing was measured since the last time.

        Else a codec that looked slow once, when the machine was busy, would never be used again.
        """
        if not self._fresh:
            self._log *= FORGET
        self._fresh = False


class Line:
    """``overhead + slope * predicted``: least squares of relative errors, the old ones fading.

    Starts as if it had seen `PRIOR` measurements that came out as predicted.
    """

    __slots__ = ("_fresh", "_sums", "overhead_s", "slope")

    def __init__(self) -> None:
        self._sums = (0.0, 0.0, 0.0, 0.0, 0.0)
        self._fresh = False
        self.overhead_s = 0.0
        self.slope = 1.0

    def seconds(self, predicted_s: float) -> float:
        """The corrected prediction."""
        return self.overhead_s + self.slope * predicted_s

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Take in one measurement; one that is far off counts as if it were less so."""
        usual = self.seconds(predicted_s)
        y = min(max(measured_s, usual * math.exp(-CLIP)), usual * math.exp(CLIP))
        x, w = predicted_s, 1 / predicted_s**2
        new = (w, w * x, w * x * x, w * y, w * x * y)
        self._sums = tuple(FADE * old + n for old, n in zip(self._sums, new, strict=True))  # type: ignore[assignment]
        self._fresh = True
        self._solve()

    def forget(self) -> None:
        """See `Correction.forget`."""
        if not self._fresh and self._sums[0]:
            self._sums = tuple(FORGET * value for value in self._sums)  # type: ignore[assignment]
            self._solve()
        self._fresh = False

    def _solve(self) -> None:
        w, wx, wxx, wy, wxy = (a + b for a, b in zip(self._sums, _PRIOR_SUMS, strict=True))
        determinant = w * wxx - wx * wx
        overhead = (wy * wxx - wxy * wx) / determinant
        slope = (wxy * w - wy * wx) / determinant
        if overhead < 0:
            overhead, slope = 0.0, wxy / wxx
        if slope < LEAST_SLOPE:
            slope = LEAST_SLOPE
            overhead = max(0.0, (wy - slope * wx) / w)
        self.overhead_s, self.slope = overhead, slope


class TimeCorrections:
    """What round trips of codecs take here and now. See Note [device and codec]."""

    def __init__(self) -> None:
        self._device = Line()
        self._codecs: dict[str, Correction] = {}

    def seconds(self, codec: str, predicted_s: float) -> float:
        """The corrected prediction of the codec's time."""
        return self._factor(codec) * self._device.seconds(predicted_s)

    def _factor(self, codec: str) -> float:
        own = self._codecs.get(codec)
        return 1.0 if own is None else own.factor

    def count(self, codec: str) -> int:
        """Measurements of this codec."""
        own = self._codecs.get(codec)
        return 0 if own is None else own.count

    def observe(self, codec: str, predicted_s: float, measured_s: float) -> None:
        """A round trip of the codec took that long; absurd times are ignored."""
        if not usable(predicted_s, measured_s):
            return
        self._device.observe(predicted_s, measured_s)
        own = self._codecs.setdefault(codec, Correction())
        own.observe(self._device.seconds(predicted_s), measured_s)

    def forget(self) -> None:
        """See `Correction.forget`."""
        self._device.forget()
        for known in self._codecs.values():
            known.forget()

    def snapshot(self) -> dict[str, float]:
        """Factors: of the device for a short and for a long job, and by codec."""
        device = {f"{x:g} s": self._device.seconds(x) / x for x in (1e-4, 1e-3)}
        return device | {name: known.factor for name, known in self._codecs.items()}
