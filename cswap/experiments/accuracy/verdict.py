"""The verdict on a policy: paired differences over seeds, their interval, and a stated margin.

docs/lossy.md explains the choice in plain words, with the model of the losses that the test of the
verdict draws from.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

EQUAL: Final = "equal within the margin"
WORSE: Final = "worse"
UNDECIDED: Final = "undecided"

CONFIDENCE: Final = 0.90
"""Of the interval: each of its two ends is wrong in one comparison of twenty, as in the usual two
one-sided tests of equivalence (Schuirmann 1987)."""

FEWEST_SEEDS: Final = 5
"""With fewer pairs, the verdict is always undecided."""


@dataclass(frozen=True, slots=True)
class Interval:
    """Paired differences over matched seeds: the policy's value minus that of plain training.

    Attributes:
        mean: mean of the differences; NaN if one of the values is not finite.
        low, high: ends of the `CONFIDENCE` interval (Student's t); None with fewer than two pairs
            or with a value that is not finite.
        pairs: number of seeds.
        spread: standard deviation of the differences; None as for low and high.
    """

    mean: float
    low: float | None
    high: float | None
    pairs: int
    spread: float | None


def interval(mine: Sequence[float], off: Sequence[float]) -> Interval:
    """The mean paired difference and its confidence interval.

    ``mean -+ t(0.95, n - 1) s / sqrt(n)``: n differences, s their standard deviation with n - 1.

    Args:
        mine: a value per seed under the policy.
        off: the value of plain training from the same seed, in the same order.

    >>> found = interval([3.0, 2.0, 4.0], [2.0, 2.0, 2.0])
    >>> found.mean, round(found.low, 3), round(found.high, 3), found.spread
    (1.0, -0.686, 2.686, 1.0)
    """
    differences = [a - b for a, b in zip(mine, off, strict=True)]
    n = len(differences)
    if not all(map(math.isfinite, differences)):
        return Interval(math.nan, None, None, n, None)
    mean = math.fsum(differences) / n
    if n < 2:
        return Interval(mean, None, None, n, None)
    spread = math.sqrt(math.fsum((one - mean) ** 2 for one in differences) / (n - 1))
    half = _quantile(n - 1) * spread / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n, spread)


@cache
def _quantile(freedom: int) -> float:
    # Of Student's t, for one end of the interval.
    from scipy import stats

    return float(stats.t.ppf((1 + CONFIDENCE) / 2, freedom))


def verdict(mine: Sequence[float], off: Sequence[float], margin: float | None) -> str:
    """Whether a policy's validation losses are equal to plain training's, worse, or undecided.

    ``EQUAL``: the interval of the mean paired difference lies below the margin. ``WORSE``: it lies
    above the margin, or a run diverged. ``UNDECIDED``: the margin lies in it, and always with fewer
    than `FEWEST_SEEDS` pairs. A loss that is certain, but may be within the margin, is not worse.

    Args:
        mine: a loss per seed under the policy; lower is better.
        off: the loss of plain training from the same seed, in the same order.
        margin: the mean loss that would not matter, stated beforehand; None: none was stated, and
            only losses without any difference are equal, and any that is certain is worse.

    >>> off = [0.30, 0.34, 0.28, 0.33, 0.31]
    >>> verdict([x + d for x, d in zip(off, (0.01, -0.01, 0.0, 0.01, -0.01))], off, margin=0.02)
    'equal within the margin'
    >>> verdict([x + d for x, d in zip(off, (0.05, 0.03, 0.04, 0.05, 0.03))], off, margin=0.02)
    'worse'
    >>> verdict([x + d for x, d in zip(off, (0.05, -0.03, 0.04, -0.02, 0.03))], off, margin=0.02)
    'undecided'
    """
    if len(mine) < FEWEST_SEEDS or not all(map(math.isfinite, off)):
        return UNDECIDED
    found = interval(mine, off)
    if found.low is None or found.high is None:
        return WORSE  # a run of the policy diverged
    if found.high < (margin or 0.0) or found.low == found.high == 0.0:
        return EQUAL
    return WORSE if found.low > (margin or 0.0) else UNDECIDED
