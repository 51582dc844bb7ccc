"""Ticks of logarithmic axes: few, in plain numbers, none printed over another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axis import Axis

MOST_DECADES: Final = 3.0
"""Longer axes have ticks at powers of ten alone; up to this length, at 1, 2 and 5 of each."""

MOST: Final = 7
"""Ticks of a long axis."""

FEWEST: Final = 3
"""Ticks; an axis too short for them at 1, 2 and 5 has evenly spaced ones."""


def plain_ticks(axis: Axis) -> None:
    """Set ticks with plain numbers: 0.5, 1, 2, 20.

    matplotlib's own label 2 to 9 times a power of ten on short axes, wider than the gaps between.
    Call it when the axis has its final limits.
    """
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = axis.get_view_interval()
    axis.set_major_locator(FixedLocator(ticks(low, high)))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())


def ticks(low: float, high: float) -> list[float]:
    """The ticks within the limits.

    >>> ticks(0.2, 7), ticks(0.3, 2e4), ticks(1.1, 1.7)
    ([0.2, 0.5, 1.0, 2.0, 5.0], [1.0, 10.0, 100.0, 1000.0, 10000.0], [1.2, 1.4, 1.6])
    """
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    is_long = math.log10(high / low) > MOST_DECADES
    found = [
        float(f"{factor}e{decade}")
        for decade in decades
        for factor in ((1,) if is_long else (1, 2, 5))
    ]
    inside = [tick for tick in found if low <= tick <= high]
    if len(inside) < FEWEST:
        return _even(low, high)
    return inside[:: -(-len(inside) // MOST)] if is_long else inside


def _even(low: float, high: float) -> list[float]:
    least = (high - low) / 5
    unit = 10.0 ** math.floor(math.log10(least))
    step = next(unit * factor for factor in (1, 2, 5, 10) if unit * factor >= least)
    first, last = math.ceil(low / step), math.floor(high / step)
    return [float(f"{n * step:.12g}") for n in range(first, last + 1)]
