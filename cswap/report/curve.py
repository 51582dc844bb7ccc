"""A curve of time over memory as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cswap.palette import BLACK, BLUE, GREY
from cswap.report.figure import image_of, new_figure

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import TypeAlias

    _At: TypeAlias = tuple[float, float]

MIB: Final = 1 << 20


def picture(points: Sequence[_At], present: _At, measured: _At | None, kind: str) -> bytes:
    """Step time against the peak of memory.

    Args:
        points: of goals, predicted, each (bytes, time over the plain step's); the first is the step
            in which everything stays.
        present: of the present plan, predicted.
        measured: of the same.
        kind: "png" or "svg".

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure = new_figure(6, 4)
    axes = figure.subplots()

    def draw(at: Sequence[_At], style: str, label: str, **more: Any) -> None:
        nbytes, times = zip(*at, strict=True)
        axes.plot([n / MIB for n in nbytes], times, style, **({"color": BLUE} | more), label=label)

    draw(points, "o-", "goals, predicted", ms=4)
    draw(points[:1], "o", "everything stays", color=BLACK)
    draw([present], "o", "the present plan, predicted", ms=10, mfc="none")
    if measured is not None:
        draw([measured], "x", "the present plan, measured", ms=8)
    axes.axhline(1.0, color=GREY, lw=0.6)
    axes.set(xlabel="peak of a step, MiB", ylabel="step time / plain step's")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return image_of(figure, kind)
