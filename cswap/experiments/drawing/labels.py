"""Words beside points of a picture, none on top of another."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Iterable

    from matplotlib.axes import Axes

_STEPS: Final = (0.8, -1.0, 1.9, -2.1, 3.0, -3.2, 4.1, -4.3)
"""Lines of text above (or below) the point that are tried, nearest first."""

_Box = tuple[float, float, float, float]


def place(axes: Axes, labels: Iterable[tuple[float, float, str]], size: float = 7) -> None:
    """Write words beside points, right or left of them, where no other word of this call stands.

    Call it when the axes have their final limits and scales. Sizes are estimates: 0.6 of the font's
    height per character.

    Args:
        axes: axes of the points.
        labels: (x, y, word), in the axes' own coordinates.
        size: size of the font, in points.
    """
    scale = axes.figure.dpi / 72
    height = 1.15 * size * scale
    frame = axes.get_window_extent()
    taken: list[_Box] = []
    for x, y, word in labels:
        at_x, at_y = axes.transData.transform((x, y))
        width = 0.6 * size * len(word) * scale
        candidates = [
            (at_x + (5 * scale if right else -5 * scale - width), at_y + (step - 0.5) * height)
            for step in _STEPS
            for right in (True, False)
        ]
        free = [c for c in candidates if _fits(_box(c, width, height), frame.extents, taken)]
        chosen = (free or candidates)[0]
        taken.append(_box(chosen, width, height))
        axes.annotate(
            word,
            (x, y),
            xytext=((chosen[0] - at_x) / scale, (chosen[1] - at_y) / scale),
            textcoords="offset points",
            fontsize=size,
            arrowprops={"arrowstyle": "-", "lw": 0.4, "color": "#777777", "shrinkB": 2},
        )


def _box(corner: tuple[float, float], width: float, height: float) -> _Box:
    return corner[0], corner[1], corner[0] + width, corner[1] + height


def _fits(box: _Box, frame: Iterable[float], taken: list[_Box]) -> bool:
    left, bottom, right, top = frame
    inside = box[0] >= left and box[1] >= bottom and box[2] <= right and box[3] <= top
    return inside and not any(
        box[0] < other[2] and other[0] < box[2] and box[1] < other[3] and other[1] < box[3]
        for other in taken
    )
