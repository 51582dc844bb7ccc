"""Words beside points of a picture: none on another or on a point, and off lines if possible."""

from __future__ import annotations

from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

    from matplotlib.axes import Axes
    from numpy.typing import NDArray

    _Boxes = NDArray[Any]

_Box = tuple[float, float, float, float]
"""Left, bottom, right, top, in pixels."""

_LINES: Final = tuple(sign * 0.8 * n for n in range(1, 13) for sign in (1, -1))
"""Lines of text above (or below) the point that are tried, nearest first."""

_MARKER: Final = 4.0
"""Half the width of a point, in typographic points."""

_GAP: Final = 1.5
"""Between words, likewise."""

_STEP: Final = 3
"""Pixels along a line between the places that words avoid."""

_MOST_BOXES: Final = 1000
"""Per segment: one may leave the frame by far."""


def place(axes: Axes, labels: Iterable[tuple[float, float, str]], size: float = 7) -> None:
    """Write words beside points where nothing else stands: words, points, legend, lines.

    Call it when the axes have their final limits and scales.

    Args:
        axes: axes of the points.
        labels: (x, y, word), in the axes' own coordinates.
        size: size of the font, in points.
    """
    import numpy as np

    labels = list(labels)
    figure: Any = axes.figure
    scale = figure.dpi / 72
    renderer = figure.canvas.get_renderer()
    points = [tuple(axes.transData.transform((x, y))) for x, y, _ in labels]
    reach = _MARKER * scale
    taken = [(x - reach, y - reach, x + reach, y + reach) for x, y in points]
    taken += [box for line in axes.lines for box in _along(line)]
    if (legend := axes.get_legend()) is not None:
        taken.append(legend.get_window_extent(renderer).extents)
    frame = axes.get_window_extent(renderer).extents
    for (x, y, word), point in zip(labels, points, strict=True):
        text = axes.annotate(
            word,
            (x, y),
            xytext=(0, 0),
            textcoords="offset points",
            fontsize=size,
            bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.6, "pad": 0.3},
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "gray", "shrinkB": 2},
        )
        text.set_in_layout(False)  # it is inside of the frame; the layout is final
        # Of the word alone, without the line to its point.
        width, height = (1.02 * n for n in _size_of(text, renderer))
        boxes = [
            (left, bottom, left + width, bottom + height)
            for left, bottom in _corners(point, width, height, scale)
        ]
        others = np.array(taken, dtype=float)
        chosen = min(boxes, key=lambda box: _overlap(box, frame, others, _GAP * scale))
        taken.append(chosen)
        text.set_position(((chosen[0] - point[0]) / scale, (chosen[1] - point[1]) / scale))


def _size_of(text: Any, renderer: Any) -> tuple[float, float]:
    from matplotlib.text import Text

    extent = Text.get_window_extent(text, renderer)
    return extent.width, extent.height


def _along(line: Any) -> Iterator[_Box]:
    # Small boxes on the way of a line.
    import numpy as np
    from matplotlib.cbook import STEP_LOOKUP_MAP

    if line.get_linestyle() == "None":
        return
    steps = STEP_LOOKUP_MAP[line.get_drawstyle()](*line.get_data())
    at = line.get_transform().transform(np.column_stack(steps))
    for (x0, y0), (x1, y1) in pairwise(at[np.isfinite(at).all(axis=1)]):
        n = min(_MOST_BOXES, 1 + int(max(abs(x1 - x0), abs(y1 - y0)) / _STEP))
        for i in range(n):
            x, y = x0 + (x1 - x0) * i / n, y0 + (y1 - y0) * i / n
            yield x - 1, y - 1, x + 1, y + 1


def _corners(
    point: tuple[float, ...], width: float, height: float, scale: float
) -> Iterator[tuple[float, float]]:
    # Left bottom corners to try: beside, then above and below the point, farther and farther off.
    x, y = point
    for lines in (0.0, *_LINES):
        bottom = y + (lines - 0.5) * height
        aside = (_MARKER + _GAP + 0.5) * scale
        yield x + aside, bottom
        yield x - aside - width, bottom
        if abs(lines) > 1:
            yield x - width / 2, bottom
            yield x + 4 * aside, bottom
            yield x - 4 * aside - width, bottom


def _overlap(box: _Box, frame: _Box, taken: _Boxes, gap: float) -> float:
    # Pixels of the box that are outside of the frame or on something; `min` takes the first 0.
    # Lines are thousands of boxes: those that share nothing with the box are left out at once.
    left, bottom, right, top = box
    inside = _common(box, frame)
    found = (right - left) * (top - bottom) - inside
    wide = (left - gap, bottom - gap, right + gap, top + gap)
    near = (taken[:, 0] < wide[2]) & (taken[:, 2] > wide[0])
    near &= (taken[:, 1] < wide[3]) & (taken[:, 3] > wide[1])
    return found + sum(_common(wide, other) for other in taken[near].tolist())


def _common(one: _Box, other: _Box) -> float:
    width = min(one[2], other[2]) - max(one[0], other[0])
    height = min(one[3], other[3]) - max(one[1], other[1])
    return max(0.0, width) * max(0.0, height)
