"""The codecs' benchmark on the user's own tensors, as tables."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cswap.experiments.codecs.case import OWN
from cswap.experiments.codecs.totals import NEARLY, best, by_data_set, totals
from cswap.experiments.grid import Grid

if TYPE_CHECKING:
    from cswap.experiments.codecs.totals import Rows


def grids(document: dict[str, Any]) -> list[Grid]:
    """A table with a row for each of the user's own tensors, and one of the totals."""
    own = [row for row in document["rows"] if row.get("family") == OWN]
    return [_each(own), _totals(own, document["settings"]["threads"])] if own else []


def _each(rows: Rows) -> Grid:
    cells = []
    for (data, dtype), found in by_data_set(rows).items():
        line = [f"{data} {dtype}", f"{found[0].nbytes / 2**20:.1f}"]
        for lossless in (True, False):
            one = best(found, lossless=lossless)
            line += ["-", ""] if one is None else [one.codec, f"{one.ratio:.2f}"]
        cells.append(line)
    headings = ("tensors", "MiB", "lossless", "ratio", "lossy", "ratio")
    return Grid(headings, cells, "Saved tensors", ["Ratios of the best codecs."])


def _totals(rows: Rows, n_threads: int) -> Grid:
    cells = [
        (
            t.codec,
            "" if t.lossless else "lossy",
            f"{t.ratio:.2f}",
            f"{t.encoded_bytes / 2**20:.1f}",
            f"{1e3 * t.encode_s:.1f}",
            f"{1e3 * t.decode_s:.1f}",
        )
        for t in sorted(totals(rows), key=lambda t: -t.ratio)
    ]
    note = (
        f"One after the other, {n_threads} threads. What a codec does not take stays as it is. "
        f"Best: the fastest that saves {NEARLY:.0%} of the most."
    )
    headings = ("codec", "", "ratio", "MiB", "encode ms", "decode ms")
    return Grid(headings, cells, "All of them", [note])
