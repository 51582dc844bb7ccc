"""Online correction of predicted times and ratios by measured ones.

Note [device and codec]
~~~~~~~~~~~~~~~~~~~~~~~
Only codecs in use are measured. Suppose that each codec were corrected alone. On a machine that is
busier than during its calibration, the codec in use would look slow and all others fast, and the
advisor would switch from one codec to the next. So all codecs share a correction for the device,
and each has a factor on top. The correction for the device is a line, ``overhead + slope *
predicted``: a round trip during training meets cold caches and new pages. Their cost is a constant;
a mere factor, learned from small tensors, would overrate it for large ones.
"""

from __future__ import annotations

import math
from collections import deque
from typing import Final

from cswap.log import log

WEIGHT: Final = 0.2
"""Weight of the newest measurement in the moving average."""

CLIP: Final = 0.5
"""Largest error in the logarithm that counts: one outlier moves the average by 10 % at most."""

CHANGE: Final = 3
"""So many measurements in a row, all off by CLIP or more on one side, are a change."""

FORGET: Final = 0.96
"""Share of a correction that is left after some steps without a measurement: half after 17."""

ABSURD: Final = 1e4
"""A measurement this many times off is an error of the clock or of the counter."""

LIMIT: Final = math.log(64)
"""Largest logarithm of a correction."""

FADE: Final = 0.97
"""Weight that a measurement of the device keeps when the next one comes."""

LEAST_SLOPE: Final = 1 / 64

PRIOR: Final = 4
"""Number of fictitious measurements, of 0.1 ms and 1 ms in turns, that a line starts with."""

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
"""Sums over them of w, w x, w x**2, w y and w x y, for y = x and weights w = 1 / x**2."""

_warned = False


def usable(predicted: float, measured: float) -> bool:
    """Whether a measurement is possible; warns once if one is not."""
    global _warned
    if measured > 0 and predicted > 0 and 1 / ABSURD < measured / predicted < ABSURD:
        return True
    if not _warned:
        _warned = True
        log.warning(
            "A measured value of %g where %g was expected is impossible; such values are ignored.",
            measured,
            predicted,
        )
    return False


class Correction:
    """Moving average of log(measured / predicted) that follows a lasting change at once."""

    __slots__ = ("_fresh", "_log", "_off", "count")

    def __init__(self) -> None:
        self._log = 0.0
        self._fresh = False
        self._off: deque[float] = deque(maxlen=CHANGE)
        self.count = 0

    @property
    def factor(self) -> float:
        """Factor for predictions."""
        return math.exp(self._log)

    def observe(self, predicted: float, measured: float) -> None:
        """Learn from one measurement; both values in the same unit, and `usable`."""
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
        """Decay towards 1, if nothing was measured since the last call.

        Otherwise a codec that once looked slow on a busy machine would never be used again.
        """
        if not self._fresh:
            self._log *= FORGET
        self._fresh = False


class Line:
    """``overhead + slope * predicted``, by least squares of relative errors with fading weights.

    A new line has `PRIOR` fictitious measurements that agree with the prediction.
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
        """Learn from one measurement; an outlier is clipped."""
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
    """Corrected times of codecs' round trips. See Note [device and codec]."""

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
        """Number of measurements of this codec."""
        own = self._codecs.get(codec)
        return 0 if own is None else own.count

    def observe(
        self, codec: str, predicted_s: float, measured_s: float, *, of_device: bool = True
    ) -> None:
        """Learn from a round trip of the codec; impossible times are ignored.

        Args:
            codec: its name.
            predicted_s: without corrections.
            measured_s: measured seconds of the round trip.
            of_device: whether the prediction rests on known rates, so that the error tells about
                the device, too.
        """
        if not usable(predicted_s, measured_s):
            return
        if of_device:
            self._device.observe(predicted_s, measured_s)
        own = self._codecs.setdefault(codec, Correction())
        own.observe(self._device.seconds(predicted_s), measured_s)

    def forget(self) -> None:
        """See `Correction.forget`."""
        self._device.forget()
        for known in self._codecs.values():
            known.forget()

    def snapshot(self) -> dict[str, float]:
        """Factors: of the device for a short and for a long time, and by codec."""
        device = {f"{x:g} s": self._device.seconds(x) / x for x in (1e-4, 1e-3)}
        return device | {name: known.factor for name, known in self._codecs.items()}
