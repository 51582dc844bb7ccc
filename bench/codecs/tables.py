"""The codecs' benchmark as tables for a terminal and for docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.codecs.crossovers import PAIRS, QUANTITIES, crossovers, sweeps
from cswap.experiments.codecs import tables as own
from cswap.experiments.codecs.case import OWN
from cswap.experiments.grid import Grid

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator
    from pathlib import Path

    from bench.codecs.crossovers import Rows

DROPPED: Final = ("x", "x", "error", "dec", "enc")
"""Columns of `grids` that a narrow terminal does without, the first to go first."""

PICTURES: Final = {
    "pareto": "Ratio against rate, per kind of recorded tensor",
    "sizes": "Rate against size",
    "sparsity-float32": "Ratio and rates against the share of zeros, float32",
    "sparsity-bfloat16": "The same for bfloat16",
}
"""Pictures that `bench.codecs.plots.draw` may write, and their descriptions."""

_WORDS: Final = {"ratio": "ratio", "encode": "encode rate", "decode": "decode rate"}
_CROSSOVER_HEADINGS: Final = ("zeros", "dtype", "better in", *(f"{a}, {b}" for a, b in PAIRS))


def grids(document: dict[str, Any]) -> list[Grid]:
    """A table of all rows but the sparsity sweep's, and one of that sweep's crossovers."""
    found = own.grids(document)
    plain = [r for r in document["rows"] if r.get("family") not in ("sparsity", OWN)]
    if plain:
        found.append(_measured(plain, document["settings"]["threads"]))
    if crossed := list(crossover_rows(document)):
        title = "Share of zeros where sparse codecs change places"
        found.append(Grid(_CROSSOVER_HEADINGS, crossed, title))
    return found


def _measured(rows: Rows, n_threads: int) -> Grid:
    cells = [
        (
            f"{r['data']} {r['dtype']}"
            + (f" {size_words(r['nbytes'])}" if r.get("family") == "sizes" else ""),
            r["codec"],
            f"{r['ratio']:.2f}",
            f"{r['encode_gb_per_s']:.2f}",
            f"{r['encode_of_memcpy']:.2f}",
            f"{r['decode_gb_per_s']:.2f}",
            f"{r['decode_of_memcpy']:.2f}",
            "" if r["lossless"] else f"{r['relative_rms_error']:.1e}",
        )
        for r in rows
    ]
    note = (
        "enc, dec: GB/s of raw bytes; x: fraction of memcpy's rate in the same rounds, "
        f"{n_threads} threads; error: relative root mean square."
    )
    headings = ("data", "codec", "ratio", "enc", "x", "dec", "x", "error")
    return Grid(headings, cells, "Codecs", [note])


def size_words(nbytes: int) -> str:
    """A power of two in words.

    >>> size_words(4096), size_words(1 << 30)
    ('4 KiB', '1 GiB')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


def crossover_rows(document: dict[str, Any]) -> Iterator[tuple[str, ...]]:
    """Per sweep and quantity, for each pair of codecs, where one takes over from the other."""
    found = crossovers(document)
    for dtype, data in sweeps(document):
        for quantity in QUANTITIES:
            mine = [c for c in found if (c.dtype, c.data, c.quantity) == (dtype, data, quantity)]
            cells = [
                "; ".join(f"{c.above} from {c.zeros:.0%}" for c in mine if pair == c.pair)
                for pair in PAIRS
            ]
            yield data, dtype, _WORDS[quantity], *(cell or "-" for cell in cells)


def crossover_lines(document: dict[str, Any]) -> list[list[str]]:
    """Headings and rows for a page; empty if the file holds no sparsity sweep."""
    rows = [list(row) for row in crossover_rows(document)]
    return [list(_CROSSOVER_HEADINGS), *rows] if rows else []


def value_lines(document: dict[str, Any]) -> list[list[str]]:
    """Headings and rows of ratios by distribution and codec; empty without that family."""
    ratios: dict[str, dict[str, float]] = {}
    for row in document["rows"]:
        if row.get("family") == "values" and row["lossless"]:
            ratios.setdefault(f"{row['data']} {row['dtype']}", {})[row["codec"]] = row["ratio"]
    if not ratios:
        return []
    codecs = list(dict.fromkeys(codec for found in ratios.values() for codec in found))
    rows = [
        [data, *(f"{found[c]:.2f}" if c in found else "-" for c in codecs)]
        for data, found in ratios.items()
    ]
    return [["ratio on", *(f"`{codec}`" for codec in codecs)], *rows]


def picture_links(folder: Path, stem: str, names: Iterable[str]) -> str:
    """Markdown of the named pictures that are there, under the names that they have in docs."""
    return "\n\n".join(
        f"![{PICTURES[name]}]({stem}-{name}.png)"
        for name in names
        if (folder / f"{stem}-{name}.png").exists()
    )
