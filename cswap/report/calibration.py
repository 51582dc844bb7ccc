"""A calibration as a table and a picture."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.display import visible
from cswap.palette import CYCLE
from cswap.report.figure import new_figure, png_of
from cswap.report.log_axis import plain_ticks

if TYPE_CHECKING:
    from collections.abc import Iterator

    from cswap.advisor.calibration import Calibration

COLUMNS: Final = (
    *("codec", "", "overhead us", "GB/s, no zeros", "GB/s, 50 %", "GB/s, 90 %", "residual"),
)
DROPPED: Final = ("residual", "GB/s, 90 %", "overhead us")
"""Columns that a narrow terminal does without, the first to go first."""

ZEROS: Final = (0.0, 0.5, 0.9)


def rows(found: Calibration) -> Iterator[tuple[str, ...]]:
    """Two rows per codec, of `COLUMNS`."""
    for name, both in found.times.items():
        for direction, model in (("encode", both.encode), ("decode", both.decode)):
            yield (
                name,
                direction,
                f"{1e6 * model.overhead_s:.1f}",
                *(f"{model.bytes_per_s(zeros) / 1e9:.1f}" for zeros in ZEROS),
                f"{model.residual:.1%}",
            )


def notes(found: Calibration) -> Iterator[str]:
    """Lines below the table: the link, and the codecs that were not measured."""
    link = found.link
    if link is not None:
        out, back = link.d2h_bytes_per_s / 1e9, link.h2d_bytes_per_s / 1e9
        yield f"Link: out {out:.1f} GB/s, back {back:.1f} GB/s, {1e6 * link.latency_s:.1f} us each;"
        yield (f"{link.duplex_factor:.0%} of that while both are busy.")
    for name, why in found.left_out.items():
        yield f"{name}: not measured ({why})."


def picture(found: Calibration) -> bytes:
    """PNG: rate of encode and decode over the share of zeros, a line per codec.

    Raises:
        UnsupportedError: matplotlib is not installed.
    """
    figure = new_figure(10, 4.5)
    for axes, direction in zip(
        figure.subplots(1, 2, sharey=True), ("encode", "decode"), strict=True
    ):
        zeros = [i / 20 for i in range(21)]
        axes.set_prop_cycle(color=CYCLE)
        for i, (name, both) in enumerate(found.times.items()):
            model = both.encode if direction == "encode" else both.decode
            rates = [model.bytes_per_s(z) / 1e9 for z in zeros]
            style = ("-", "--", ":", "-.")[i // len(CYCLE) % 4]
            label = visible(name).replace("$", r"\$")  # else matplotlib sets a formula
            axes.plot([100 * z for z in zeros], rates, style, label=label)
        axes.set(title=direction, xlabel="zeros, %", yscale="log")
        axes.grid(alpha=0.3)
    plain_ticks(figure.axes[0].yaxis)  # the panels share it
    figure.axes[0].set_ylabel("GB/s of raw bytes, large tensors")
    figure.axes[1].legend(fontsize=7, loc="center left", bbox_to_anchor=(1, 0.5))
    return png_of(figure)
