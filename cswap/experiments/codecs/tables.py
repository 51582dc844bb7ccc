"""The codecs' benchmark as tables for a terminal and for docs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from rich.table import Table

from cswap.experiments.codecs.cases import OWN
from cswap.experiments.codecs.crossovers import PAIRS, QUANTITIES, crossovers, sweeps
from cswap.experiments.codecs.totals import NEARLY, best, by_data_set, totals
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence
    from pathlib import Path

    from cswap.experiments.codecs.contenders import Row
    from cswap.experiments.codecs.crossovers import Rows

DROPPED: Final = ("x", "x", "error", "dec", "enc")
"""Columns of `tables` that a narrow terminal does without, the first to go first."""

PICTURES: Final = {
    "pareto": "Ratio against rate, per kind of recorded tensor",
    "sizes": "Rate against size",
    "sparsity-float32": "Ratio and rates against the share of zeros, float32",
    "sparsity-bfloat16": "The same for bfloat16",
}
"""Pictures that `cswap.experiments.codecs.plots.draw` may write, and their descriptions."""

_WORDS: Final = {"ratio": "ratio", "encode": "encode rate", "decode": "decode rate"}


def tables(rows: Sequence[Row], document: dict[str, Any], n_threads: int) -> Iterator[Table]:
    """One of all rows but the sparsity sweep's, and one of that sweep's crossovers.

    Of the user's own tensors: one with a row for each, and one of the totals.
    """
    own = [r for r in document["rows"] if r["family"] == OWN]
    plain = [r for r in rows if r.family not in ("sparsity", OWN)]
    if own:
        yield _each(own)
        yield _totals(own, n_threads)
    if plain:
        yield _measured(plain, n_threads)
    if sweeps(document):
        table = Table(
            *_CROSSOVER_HEADINGS, title="Share of zeros where sparse codecs change places"
        )
        for line in crossover_rows(document):
            table.add_row(*line)
        yield table


def _each(rows: Rows) -> Table:
    table = Table(title="Saved tensors", caption="Ratios of the best codecs.")
    table.add_column("tensors")
    for heading in ("MiB", "lossless", "ratio", "lossy", "ratio"):
        table.add_column(
            heading, justify="right" if heading in ("MiB", "ratio") else "left", no_wrap=True
        )
    for (data, dtype), found in by_data_set(rows).items():
        cells = [f"{data} {dtype}", f"{found[0].nbytes / 2**20:.1f}"]
        for lossless in (True, False):
            one = best(found, lossless=lossless)
            cells += ["-", ""] if one is None else [one.codec, f"{one.ratio:.2f}"]
        table.add_row(*map(literal, cells))
    return table


def _totals(rows: Rows, n_threads: int) -> Table:
    table = Table(
        title="All of them",
        caption=f"One after the other, {n_threads} threads. What a codec does not take stays "
        f"as it is. Best: the fastest that saves {NEARLY:.0%} of the most.",
    )
    table.add_column("codec", no_wrap=True)
    table.add_column("", no_wrap=True)
    for heading in ("ratio", "MiB", "encode ms", "decode ms"):
        table.add_column(heading, justify="right", no_wrap=True)
    for t in sorted(totals(rows), key=lambda t: -t.ratio):
        sizes = f"{t.ratio:.2f}", f"{t.encoded_bytes / 2**20:.1f}"
        times = f"{1e3 * t.encode_s:.1f}", f"{1e3 * t.decode_s:.1f}"
        table.add_row(literal(t.codec), "" if t.lossless else "lossy", *sizes, *times)
    return table


def _measured(rows: Sequence[Row], n_threads: int) -> Table:
    table = Table(
        title="Codecs",
        caption="enc, dec: GB/s of raw bytes; x: fraction of memcpy's rate in the same rounds, "
        f"{n_threads} threads; error: relative root mean square.",
    )
    table.add_column("data", no_wrap=True)
    table.add_column("codec", no_wrap=True)
    for heading in ("ratio", "enc", "x", "dec", "x", "error"):
        table.add_column(heading, justify="right", no_wrap=True)
    for i, r in enumerate(rows):
        last = i + 1 == len(rows) or _data_set(rows[i + 1]) != _data_set(r)
        size = f" {size_words(r.nbytes)}" if r.family == "sizes" else ""
        table.add_row(
            literal(f"{r.data} {r.dtype}{size}"),
            literal(r.codec),
            f"{r.ratio:.2f}",
            f"{r.encode_gb_per_s:.2f}",
            f"{r.encode_of_memcpy:.2f}",
            f"{r.decode_gb_per_s:.2f}",
            f"{r.decode_of_memcpy:.2f}",
            "" if r.lossless else f"{r.relative_rms_error:.1e}",
            end_section=last,
        )
    return table


def _data_set(row: Row) -> tuple[object, ...]:
    return row.family, row.data, row.dtype, row.nbytes


def size_words(nbytes: int) -> str:
    """A power of two in words.

    >>> size_words(4096), size_words(1 << 30)
    ('4 KiB', '1 GiB')
    """
    for unit, factor in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if nbytes >= factor:
            return f"{nbytes / factor:g} {unit}"
    return f"{nbytes} B"


_CROSSOVER_HEADINGS: Final = ("zeros", "dtype", "better in", *(f"{a}, {b}" for a, b in PAIRS))


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
