"""Interleaved timing: A B C A B C ..., so that a drift of the machine hits all alike."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence


SETTLE_S: Final = 0.02
"""Pause before each run: torch's threads spin after an operation, on cores that the next
contender's threads need.
"""


@dataclass(frozen=True, slots=True)
class Timing:
    """Seconds of one contender over all rounds.

    Attributes:
        median_s: median.
        low_s: 20 % quantile.
        high_s: 80 % quantile.
    """

    median_s: float
    low_s: float
    high_s: float


def interleaved(
    contenders: Mapping[str, Callable[[], object]],
    *,
    rounds: int,
    warmup: int = 1,
    repeats: int = 1,
) -> dict[str, Timing]:
    """Time every contender once per round; the rounds of the warm-up are not counted.

    Args:
        contenders: functions to run, by name.
        rounds: counted rounds.
        warmup: rounds before them.
        repeats: calls per reading of the clock, for short functions; a timing is of one call.
    """
    seconds: dict[str, list[float]] = {name: [] for name in contenders}
    for round_ in range(warmup + rounds):
        for name, run in contenders.items():
            time.sleep(SETTLE_S)
            start = time.perf_counter()
            for _ in range(repeats):
                run()
            elapsed = (time.perf_counter() - start) / repeats
            if round_ >= warmup:
                seconds[name].append(elapsed)
    return {name: timing_of(values) for name, values in seconds.items()}


def timing_of(values: Sequence[float]) -> Timing:
    """Sum up the seconds of one contender."""
    ordered = sorted(values)
    last = len(ordered) - 1
    return Timing(
        statistics.median(ordered), ordered[round(0.2 * last)], ordered[round(0.8 * last)]
    )
