"""A calibration as a table."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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
