"""The price λ of a byte, by which device time and link time are compared.

A tensor's cost is ``device time + price * bytes``. While computation hides all transfers, a byte
costs nothing, and raw is cheapest. When it hides none, a byte costs its time on the link. In
between, the price makes the transfers just fit into the hidden time: it is the Lagrange multiplier
of that limit, found by bisection.
"""

from __future__ import annotations

import statistics
from collections import deque
from typing import TYPE_CHECKING, Final

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

FORWARD_SHARE: Final = 1 / 3
"""Share of a step's computation in forward: backward has two products for each of forward."""

ROUNDS: Final = 30
"""Rounds of bisection: the error is 2**-30 of the highest price."""

STEPS: Final = 16
"""Number of steps whose mean is the time of a step. A device measures one wait in several, for all
of them, so most steps seem to have none."""

LEAST_STEPS: Final = 4
"""Steps before which nothing is said of their time: the first ones compile and pin memory. A time
that is far too long would hide all transfers, and tensors would go raw."""

OUTLIER: Final = 3.0
"""A step this many times longer than the lower quartile does not count: it compiled, pinned memory,
or somebody paused."""


def fit_price(
    options: Sequence[Sequence[tuple[float, float]]], limit_bytes: float, highest: float
) -> float:
    """The lowest price at which the cheapest options together have at most ``limit_bytes``.

    Args:
        options: per tensor and codec: seconds on the device, encoded bytes.
        limit_bytes: most encoded bytes of all tensors together.
        highest: price in seconds per byte that is never exceeded.
    """
    if not options:
        return 0.0
    device_s, nbytes = _table(options)

    def total(price: float) -> float:
        chosen = np.argmin(device_s + price * nbytes, axis=1)
        return float(nbytes[np.arange(len(chosen)), chosen].sum())

    if total(0.0) <= limit_bytes:
        return 0.0
    if total(highest) > limit_bytes:
        return highest
    low, high = 0.0, highest
    for _ in range(ROUNDS):
        middle = (low + high) / 2
        if total(middle) <= limit_bytes:
            high = middle
        else:
            low = middle
    return high


def link_price(
    options: Sequence[Sequence[tuple[float, float]]],
    rates: tuple[float, float],
    hidden: tuple[float, float],
) -> float:
    """The price at which device time plus exposed transfer time is least.

    The exposed time is the transfers' time beyond the computation that hides them:
    ``max(bytes / d2h - forward, 0) + max(bytes / h2d - backward, 0)``. As a function of the bytes
    it has three slopes and two bends. The price is one of the slopes, or holds the bytes at a bend.

    Source: the objective is CSwap+'s (TPDS 33(12), 2022, Eq. 3-7), for all tensors together.

    Args:
        options: per tensor and codec: seconds on the device, encoded bytes.
        rates: of the link, device to host and back, in bytes per second.
        hidden: seconds of forward, and of backward, that hide transfers.
    """
    bends = sorted((rate * seconds, 1 / rate) for rate, seconds in zip(rates, hidden, strict=True))
    (first, slope), (second, other) = bends
    return max(
        fit_price(options, first, slope), _from(slope, fit_price(options, second, slope + other))
    )


def _from(least: float, price: float) -> float:
    # Below the first slope, the second bend does not matter.
    return price if price > least else 0.0


def _table(
    options: Sequence[Sequence[tuple[float, float]]],
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    # Rows of unequal length are filled up with options that are never cheapest.
    width = max(len(row) for row in options)
    device_s = np.full((len(options), width), np.inf)
    nbytes = np.zeros((len(options), width))
    for i, row in enumerate(options):
        device_s[i, : len(row)] = [seconds for seconds, _ in row]
        nbytes[i, : len(row)] = [n for _, n in row]
    return device_s, nbytes


class StepClock:
    """Estimates the computing time of a step from the times at which steps begin."""

    def __init__(self) -> None:
        self._began: float | None = None
        self._exposed_s = 0.0
        self._steps: deque[tuple[float, float]] = deque(maxlen=STEPS)  # seconds, waits

    def begin_step(self, now_s: float, exposed_s: float) -> None:
        """A step begins.

        Args:
            now_s: monotonic time; a step in which the clock goes back is ignored.
            exposed_s: seconds that computation has waited for swaps since the first step.
        """
        if self._began is not None:
            step_s = now_s - self._began
            if 0 < step_s < float("inf"):
                self._steps.append((step_s, exposed_s - self._exposed_s))
        self._began, self._exposed_s = now_s, exposed_s

    @property
    def step_s(self) -> float | None:
        """Mean seconds of a step without its waits for swaps; None in the first steps."""
        if len(self._steps) < LEAST_STEPS:
            return None
        ordered = sorted(step_s for step_s, _ in self._steps)
        longest = OUTLIER * ordered[(len(ordered) - 1) // 4]
        usual = [(step_s, wait_s) for step_s, wait_s in self._steps if step_s <= longest]
        return max(0.0, statistics.fmean(step_s - wait_s for step_s, wait_s in usual))
