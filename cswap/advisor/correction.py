"""Online correction of predicted times by measured ones.

Note [device and codec]
~~~~~~~~~~~~~~~~~~~~~~~
Only codecs in use are measured. Suppose that each codec were corrected alone. On a machine that is
busier than during its calibration, the codec in use would look slow and all others fast, and the
advisor would switch from one codec to the next. So all codecs share a correction for the device,
and each has a factor on top. The correction for the device is a line, ``overhead + slope *
predicted``: a round trip during training meets cold caches and new pages. Their cost is a constant;
a mere factor, learned from small tensors, would overrate it for large ones. The line is nowhere
below the prediction: a codec that is faster than foretold says nothing of the others.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from typing import Final

import numpy as np

from cswap.advisor.fit import robust
from cswap.log import log

LATEST: Final = 5
"""Measurements of a codec whose median counts: an outlier changes nothing, three alike do."""

WINDOW: Final = 64
"""Measurements that the device's line is fitted to."""

PRIOR: Final = (1e-4, 1e-4, 1e-3, 1e-3)
"""Predicted seconds of fictitious measurements that agree with them: every line begins so."""

FORGET: Final = 0.8
"""Share of a correction that is left after a refit without a measurement: half after three."""

ABSURD: Final = 1e4
"""A measurement this many times off is an error of the clock."""

_warned = False


class TimeCorrections:
    """Corrected times of codecs' round trips. See Note [device and codec]."""

    def __init__(self) -> None:
        self._new: deque[tuple[str, float, float, bool]] = deque(maxlen=4 * WINDOW)
        self._device: deque[tuple[float, float]] = deque(maxlen=WINDOW)
        self._line = (0.0, 1.0)
        self._codecs: dict[str, deque[float]] = {}  # logarithms of the latest factors

    def seconds(self, codec: str, predicted_s: float) -> float:
        """The corrected prediction of the codec's time."""
        return self._factor(codec) * self._on_device(predicted_s)

    def observe(
        self, codec: str, predicted_s: float, measured_s: float, *, of_device: bool = True
    ) -> None:
        """Learn from a round trip of the codec, at the next refit; impossible times are ignored.

        Args:
            codec: its name.
            predicted_s: without corrections.
            measured_s: measured seconds of the round trip.
            of_device: whether the prediction rests on known rates, so that the error tells about
                the device, too.
        """
        if _is_possible(predicted_s, measured_s):
            self._new.append((codec, predicted_s, measured_s, of_device))

    def refit(self) -> None:
        """Correct by the measurements since the last call. The rest of a correction fades.

        Otherwise a codec that once looked slow on a busy machine would never be used again.
        """
        if not self._new and not self._codecs:
            return
        new = [self._new.popleft() for _ in range(len(self._new))]
        of_device = [(predicted, measured) for _, predicted, measured, known in new if known]
        if of_device:
            self._device += of_device
        else:
            left = int(FORGET * len(self._device))
            self._device = deque([*self._device][len(self._device) - left :], WINDOW)
        points = np.array([*self._device, *zip(PRIOR, PRIOR, strict=True)])
        predicted = points[:, 0]
        terms = np.column_stack((1 / predicted, np.ones_like(predicted)))
        (overhead, more), _ = robust(terms, points[:, 1] / predicted - 1)
        self._line = float(overhead), 1 + float(more)
        for name in self._codecs.keys() - {name for name, *_ in new}:
            latest = self._codecs[name]
            self._codecs[name] = deque((FORGET * log_ for log_ in latest), LATEST)
        for name, predicted_s, measured_s, _ in new:
            found = math.log(measured_s / self._on_device(predicted_s))
            self._codecs.setdefault(name, deque(maxlen=LATEST)).append(found)

    def _on_device(self, predicted_s: float) -> float:
        overhead_s, slope = self._line
        return overhead_s + slope * predicted_s

    def _factor(self, codec: str) -> float:
        latest = self._codecs.get(codec, ())
        return math.exp(statistics.median([*latest, *(LATEST - len(latest)) * [0.0]]))


def _is_possible(predicted_s: float, measured_s: float) -> bool:
    # Warns once if it is not.
    global _warned
    if measured_s > 0 and predicted_s > 0 and 1 / ABSURD < measured_s / predicted_s < ABSURD:
        return True
    if not _warned:
        _warned = True
        log.warning(
            "A measured time of %g s where %g s was expected is impossible; such times are "
            "ignored.",
            measured_s,
            predicted_s,
        )
    return False
