"""The table of `python -m bench gpu static`, in Markdown: computed figures, and said to be."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.pages.committed import as_markdown, load

if TYPE_CHECKING:
    from collections.abc import Iterable

FILE: Final = "kernels.json"

Rows = dict[tuple[str, str, str, int], dict[str, Any]]


def kernels_table() -> str:
    """How fast each kernel can be at best, computed from its machine code."""
    data = load(FILE)
    rows = _by_key(data["rows"])
    processors = data["assumed"]["processors"]
    newest = processors[0]["architecture"]
    headings = ["tensor", "codec", "ratio", "registers", "spilled bytes", "shared KiB"]
    headings += [f"{processors[0]['name']} occupancy", "instructions per 32 words"]
    headings += [f"{p['name']} GB/s" for p in processors]
    lines = []
    for codec, dtype in dict.fromkeys((r["codec"], r["dtype"]) for r in data["rows"]):
        both = [rows[codec, dtype, d, newest] for d in ("encode", "decode")]
        lines.append(
            [
                f"{both[0]['data']} {dtype}",
                f"`{codec}`",
                f"{both[0]['ratio']:.2f}",
                _pair(row["registers"] for row in both),
                _pair(row["local_bytes"] for row in both),
                _pair(round(row["shared_bytes"] / 1024) for row in both),
                _pair(f"{row['occupancy'][processors[0]['name']]:.2f}" for row in both),
                _pair(f"{row['instructions']:.1f}" for row in both),
                *(_rates(rows, codec, dtype, p) for p in processors),
            ]
        )
    return as_markdown(headings, lines) + "\n\n" + _where(data)


def _by_key(rows: Iterable[dict[str, Any]]) -> Rows:
    return {(r["codec"], r["dtype"], r["direction"], r["architecture"]): r for r in rows}


def _pair(values: Iterable[object]) -> str:
    first, second = (str(v) for v in values)
    return first if first == second else f"{first} / {second}"


def _rates(rows: Rows, codec: str, dtype: str, processor: dict[str, Any]) -> str:
    key, name = processor["architecture"], processor["name"]
    both = [rows[codec, dtype, d, key]["bound_bytes_per_s"][name] for d in ("encode", "decode")]
    return _pair(f"{rate / 1e9:.0f}" for rate in both)


def _where(data: dict[str, Any]) -> str:
    assumed, where = data["assumed"], data["environment"]
    return (
        f"**Computed, not measured**, by `{where['command']}`: the lower of the rates at which "
        f"schedulers issue in {100 * assumed['issue_share']:.0f} % of the cycles and at which "
        f"memory moves {100 * assumed['memory_share']:.0f} % of its nominal bytes, both assumed. "
        f"Rates count raw bytes. Compiler: nvJitLink {where['compilers']['nvidia-nvjitlink']}, "
        f"numba-cuda {where['compilers']['numba-cuda']}; file: `bench/results/cpu/{FILE}`."
    )
