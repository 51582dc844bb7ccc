"""Ticks of logarithmic axes: few, in plain numbers, none printed over another."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from matplotlib.axis import Axis

MOST_DECADES: Final = 3.0
"""Longer axes have ticks at powers of ten alone; up to this length, at 1, 2 and 5 of each."""

SHORT: Final = 5
"""Axes whose ends have a smaller quotient have evenly spaced ticks."""

MOST: Final = 7
"""Ticks of an axis."""


def plain_ticks(axis: Axis) -> None:
    """Set ticks with plain numbers: 0.5, 1, 2, 20.

    matplotlib's own label 2 to 9 times a power of ten on short axes, wider than the gaps between.
    Call it when the axis has its final limits.
    """
    from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

    low, high = axis.get_view_interval()
    factors = (1,) if math.log10(high / low) > MOST_DECADES else (1, 2, 5)
    axis.set_major_locator(
        MaxNLocator(MOST) if high / low < SHORT else LogLocator(subs=factors, numticks=MOST)
    )
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
