"""Tables of codecs and of accuracy in Markdown, from the committed result files."""

from __future__ import annotations

from typing import Any, Final

from bench.codecs import tables
from bench.pages.committed import as_markdown as _markdown
from bench.pages.committed import load as _load
from bench.pages.committed import where as _where
from cswap.experiments.accuracy.report import COLUMNS, notes
from cswap.experiments.accuracy.report import rows as accuracy_rows


def _recorded() -> dict[str, Any]:
    # The codecs' results on recorded tensors.
    data = _load("codecs.json")
    return {**data, "rows": [r for r in data["rows"] if r["family"] == "recorded"]}


def all_codecs_table() -> str:
    """Every codec on every recorded tensor."""
    data = _recorded()
    rows = [(kind, f"`{codec}`", *rest) for kind, codec, *rest in tables.measured(data["rows"])]
    return _markdown(tables.HEADINGS, rows) + "\n\n" + _where(data, "codecs.json")


_OWN_KIND: Final = (
    ("zvc", "relu float32"),
    ("zvc+expk", "relu float32"),
    ("zvc+expk", "relu bfloat16"),
    ("expk", "gelu float32"),
    ("expk", "gelu bfloat16"),
    ("bitpack", "mask bool"),
    ("bitpack", "index int64"),
    ("bitpack", "token int64"),
)
"""The data that each of our lossless codecs is for."""


def peers_table() -> str:
    """Our lossless codecs on their own kind of data, against lz4 and zstd."""
    data = _recorded()
    found = {(r["codec"], f"{r['data']} {r['dtype']}"): r for r in data["rows"]}
    rows = []
    for codec, kind in _OWN_KIND:
        ours, lz4, zstd = (found[name, kind] for name in (codec, "lz4", "zstd"))
        faster = [f"{ours['encode_gb_per_s'] / r['encode_gb_per_s']:.1f}" for r in (lz4, zstd)]
        ratios = [f"{r['ratio']:.2f}" for r in (ours, lz4, zstd)]
        rows.append([f"`{codec}` on {kind}", *faster, *ratios])
    headings = ["codec and data", "encode rate / lz4's", "/ zstd's", "ratio", "lz4's", "zstd's"]
    return _markdown(headings, rows) + "\n\n" + _where(data, "codecs.json")


def values_table() -> str:
    """Ratios of lossless codecs by distribution of values."""
    data = _load("codecs.json")
    grid = tables.value_grid(data)
    return f"{_markdown(grid.headings, grid.rows)}\n\n{_where(data, 'codecs.json')}"


def accuracy_table() -> str:
    """The effect of lossy swapping on accuracy."""
    data = _load("accuracy/results.json")
    table = _markdown(COLUMNS, accuracy_rows(data))
    return f"{table}\n\n{' '.join(notes(data))}\n\n" + _where(data, "accuracy/results.json")


TABLES: Final = {
    "accuracy": accuracy_table,
    "all codecs": all_codecs_table,
    "peers": peers_table,
    "values": values_table,
}
"""Functions that make the tables, by name."""
