"""A curve of time over memory as a table's columns, and as a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.palette import BLACK, BLUE, GREY
from cswap.report.figure import image_of, new_figure

if TYPE_CHECKING:
    from cswap.fit.curve import Curve

COLUMNS: Final = ("fit=", "peak", "time / plain", "added ms", "tensors", "")

MIB: Final = 1 << 20


def picture(curve: Curve, kind: str) -> bytes:
    """Step time over the plain one's against the peak of memory.

    Args:
        curve: to draw.
        kind: "png" or "svg".

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure = new_figure(6, 4)
    axes = figure.subplots()
    plain, now = curve.points[0], curve.present
    peaks = [point.peak_bytes / MIB for point in curve.points]
    times = [point.slowdown for point in curve.points]
    axes.plot(peaks, times, "o-", ms=4, color=BLUE, label="goals, predicted")
    axes.plot(plain.peak_bytes / MIB, plain.slowdown, "o", color=BLACK, label="everything stays")
    at = now.peak_bytes / MIB, now.slowdown
    axes.plot(*at, "o", ms=10, mfc="none", color=BLUE, label="the present plan, predicted")
    if now.measured_bytes is not None and now.measured_s is not None:
        at = now.measured_bytes / MIB, now.measured_s / curve.plain_s
        axes.plot(*at, "x", ms=8, color=BLUE, label="the present plan, measured")
    axes.axhline(1.0, color=GREY, lw=0.6)
    axes.set(xlabel="peak of a step, MiB", ylabel="step time / plain step's")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    return image_of(figure, kind)
