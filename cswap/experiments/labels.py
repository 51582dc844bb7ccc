"""Names of points in a picture: a column beside the axes, joined to the points by thin lines."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes

_LINE: Final = 1.25
"""Height of a line of text, as a multiple of the font's size."""


def place(axes: Axes, labels: Iterable[tuple[float, float, str]], size: float = 7) -> None:
    """Write words at the right of the axes, in the order of their points' heights.

    Each stands as near to the height of its point as the others allow. Call it when the axes have
    their final limits and scales.

    Args:
        axes: axes of the points.
        labels: (x, y, word), in the axes' own coordinates.
        size: size of the font, in points.
    """
    figure: Any = axes.figure
    to_axes = axes.transData + axes.transAxes.inverted()
    # Of two at one height, the right one is named below: their lines do not cross.
    ordered = sorted(labels, key=lambda label: (label[1], -label[0]))
    heights = [float(to_axes.transform((x, y))[1]) for x, y, _ in ordered]
    gap = _LINE * size * figure.dpi / 72 / axes.bbox.height
    for (x, y, word), height in zip(ordered, apart(heights, gap), strict=True):
        axes.annotate(
            word,
            (x, y),
            xytext=(1.03, height),
            textcoords="axes fraction",
            va="center",
            fontsize=size,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "gray", "shrinkB": 3},
        )


def apart(heights: list[float], gap: float) -> list[float]:
    """Ascending heights, moved apart to at least a gap: below 1 as long as they fit there.

    >>> apart([0.1, 0.9, 0.9], 0.25)
    [0.1, 0.75, 1.0]
    >>> apart([0.5, 0.5], 0.25)
    [0.5, 0.75]
    """
    found: list[float] = []
    for height in heights:
        found.append(max(height, found[-1] + gap) if found else height)
    top = 1.0
    for i in range(len(found) - 1, -1, -1):
        found[i] = min(found[i], top)
        top = found[i] - gap
    return found
