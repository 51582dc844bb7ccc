"""The codecs' benchmark as tables for a terminal and for docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cswap.experiments.codecs import tables as own
from cswap.experiments.codecs.case import OWN
from cswap.experiments.grid import Grid
from cswap.units import show_bytes

if TYPE_CHECKING:
    from bench.codecs.plots import Rows

HEADINGS: Final = (
    *("data", "codec", "ratio", "encode GB/s", "of memcpy", "decode GB/s", "of memcpy"),
    "relative RMS error",
)
DROPPED: Final = ("of memcpy", "of memcpy", "relative RMS error", "decode GB/s", "encode GB/s")
"""Columns of `grids` that a narrow terminal does without, the first to go first."""

PICTURES: Final = {
    "pareto": "Ratio against rate, per kind of recorded tensor",
    "sizes": "Rate against size",
    "sparsity-float32": "Ratio and rates against the share of zeros, float32",
    "sparsity-bfloat16": "The same for bfloat16",
}
"""Pictures that `bench.codecs.plots.draw` writes, and their descriptions."""


def grids(document: dict[str, Any]) -> list[Grid]:
    """A table of all rows but the sparsity sweep's, which has pictures."""
    found = own.grids(document)
    plain = [r for r in document["rows"] if r.get("family") not in ("sparsity", OWN)]
    if plain:
        note = f"Rates with {document['settings']['threads']} threads."
        found.append(Grid(HEADINGS, measured(plain), "Codecs", [note]))
    return found


def measured(rows: Rows) -> list[tuple[str, ...]]:
    """Rows of `HEADINGS`: raw bytes per second, and the fraction of memcpy's rate in its rounds."""
    return [
        (
            f"{r['data']} {r['dtype']}"
            + (f" {show_bytes(r['nbytes'])}" if r.get("family") == "sizes" else ""),
            r["codec"],
            f"{r['ratio']:.2f}",
            f"{r['encode_gb_per_s']:.1f}",
            f"{r['encode_of_memcpy']:.2f}",
            f"{r['decode_gb_per_s']:.1f}",
            f"{r['decode_of_memcpy']:.2f}",
            "" if r["lossless"] else f"{r['relative_rms_error']:.1e}",
        )
        for r in rows
    ]


def value_grid(document: dict[str, Any]) -> Grid:
    """Ratios by distribution and codec."""
    ratios: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        if row.get("family") == "values" and row["lossless"]:
            ratios.setdefault(f"{row['data']} {row['dtype']}", {})[row["codec"]] = row["ratio"]
    codecs = list(dict.fromkeys(codec for found in ratios.values() for codec in found))
    rows = [
        [data, *(f"{found[c]:.2f}" if c in found else "-" for c in codecs)]
        for data, found in ratios.items()
    ]
    return Grid(["ratio on", *(f"`{codec}`" for codec in codecs)], rows)
