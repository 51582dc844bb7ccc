"""Online correction: what was measured, over what was predicted.

Note [two factors]
~~~~~~~~~~~~~~~~~~
Only codecs that are used are measured. Were each corrected alone, then a machine that is busier
than when it was calibrated would make the codec in use look slow and all others fast, and the
advisor would run from one to the next. So there is a factor for the device, learned from all of
them, and one per codec on top.
"""

from __future__ import annotations

import logging
import math
from collections import deque
from typing import Final

_log = logging.getLogger("cswap")

WEIGHT: Final = 0.2
"""Of the newest measurement in the moving average."""

CLIP: Final = 0.5
"""Of the logarithm: one outlier moves the average by no more than WEIGHT * CLIP, 10 %."""

CHANGE: Final = 3
"""Measurements in a row that are off by CLIP or more, on one side: a change, no outlier."""

FORGET: Final = 0.99
"""Of what is not measured, that is left of a correction after a step: half of it after 69."""

ABSURD: Final = 1e4
"""A measurement this many times off is the clock's or the counter's fault."""

LIMIT: Final = math.log(64)

_warned = False


def usable(predicted: float, measured: float) -> bool:
    """Whether a measurement can be true; says so once if one cannot."""
    global _warned
    if measured > 0 and predicted > 0 and 1 / ABSURD < measured / predicted < ABSURD:
        return True
    if not _warned:
        _warned = True
        _log.warning(
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

    def begin_step(self) -> None:
        """Forget a little of what the step before did not confirm.

        Else a codec that looked slow once, when the machine was busy, would never be used again.
        """
        if not self._fresh:
            self._log *= FORGET
        self._fresh = False


class TimeCorrections:
    """How much slower codecs are here and now than the model says. See Note [two factors]."""

    def __init__(self) -> None:
        self._device = Correction()
        self._codecs: dict[str, Correction] = {}

    def factor(self, codec: str) -> float:
        """To multiply the codec's predicted time with."""
        own = self._codecs.get(codec)
        return self._device.factor * (1.0 if own is None else own.factor)

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
        own.observe(predicted_s * self._device.factor, measured_s)

    def begin_step(self) -> None:
        """See `Correction.begin_step`."""
        for known in (self._device, *self._codecs.values()):
            known.begin_step()

    def snapshot(self) -> dict[str, float]:
        """Factor by codec, and "" for the device's."""
        return {"": self._device.factor} | {name: self.factor(name) for name in self._codecs}
