"""Paired comparison over matched seeds."""

from __future__ import annotations

import math
import statistics
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Sequence

CONFIDENCE: Final = 0.95


@dataclass(frozen=True, slots=True)
class Comparison:
    """A policy against off, over the same seeds.

    Attributes:
        mean: of the paired differences, the policy's minus off's.
        low, high: its confidence interval (Student's t over the pairs); None with one seed.
        spread: off's largest minus smallest value over the seeds: what chance alone changes.
        verdict: "equal" if every pair is; "within seed spread" if no pair is worse than off by
            more than the spread; "beyond seed spread"; "unknown" with one seed; "diverged" if a
            value is not finite.
    """

    mean: float
    low: float | None
    high: float | None
    spread: float
    verdict: str


def compare(mine: Sequence[float], off: Sequence[float], *, lower_is_better: bool) -> Comparison:
    """Compare values of matched seeds.

    The interval is ``mean -+ t(0.975, n - 1) s / sqrt(n)``: n paired differences, s their standard
    deviation with n - 1.
    """
    if not all(map(math.isfinite, (*mine, *off))):
        return Comparison(math.nan, None, None, math.nan, "diverged")
    differences = [a - b for a, b in zip(mine, off, strict=True)]
    mean, spread = statistics.fmean(differences), max(off) - min(off)
    worst = max(differences) if lower_is_better else -min(differences)
    if not any(differences):
        bound = 0.0 if len(differences) > 1 else None
        return Comparison(0.0, bound, bound, spread, "equal")
    if len(differences) < 2:
        return Comparison(mean, None, None, spread, "unknown")
    from scipy import stats

    half = float(
        stats.t.ppf((1 + CONFIDENCE) / 2, len(differences) - 1)
        * statistics.stdev(differences)
        / len(differences) ** 0.5
    )
    verdict = "within seed spread" if worst <= spread else "beyond seed spread"
    return Comparison(mean, mean - half, mean + half, spread, verdict)
