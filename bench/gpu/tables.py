"""The benchmarks' tables, in Markdown, made from result files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from bench.pages.committed import as_markdown

if TYPE_CHECKING:
    from collections.abc import Sequence

MIB: Final = 1 << 20
GIB: Final = 1 << 30
UNKNOWN: Final = "-"


def markdown(document: dict[str, Any]) -> str:
    """The table of one result file, and the measurements that it lacks."""
    headings, rows = _TABLES[document["part"]](document["rows"])
    text = [as_markdown(headings, rows)]
    text += [f"- {s['what']}: not measured ({s['why']})" for s in document["skipped"]]
    if not document["complete"]:
        text.append("- The run was cut short.")
    return "\n".join(text)


def _codecs(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    headings = [
        *("data", "MiB", "codec", "ratio", "encode GB/s", "of copy", "decode GB/s", "of copy"),
        *("launch us", "error"),
    ]
    return headings, [
        [
            f"{r['data']} {r['dtype']}",
            f"{r['nbytes'] / MIB:g}",
            r["codec"],
            f"{r['ratio']:.2f}",
            f"{r['encode_gb_per_s']:.0f}",
            f"{r['encode_of_copy']:.2f}",
            f"{r['decode_gb_per_s']:.0f}",
            f"{r['decode_of_copy']:.2f}",
            f"{r['encode_launch_us']:.0f} + {r['decode_launch_us']:.0f}",
            "0" if r["lossless"] else f"{r['relative_rms_error']:.1e}",
        ]
        for r in rows
    ]


def _link(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    # An older file has kernels, too, that stored their encodings in host memory.
    ways = [r["way"] + (f", {n} blocks" if (n := r.get("blocks")) else "") for r in rows]
    return ["way", "MiB moved", "GB/s"], [
        [way, f"{r['nbytes'] / MIB:g}", f"{r['gb_per_s']:.1f}"]
        for way, r in zip(ways, rows, strict=True)
    ]


def _swap(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    headings = [
        *("data", "MiB", "way", "ratio", "out ms", "back ms", "less than copy"),
        *("less than save_on_cpu", "of bound", "host us"),
    ]
    return headings, [
        [
            f"{r['data']} {r['dtype']}",
            f"{r['nbytes'] / MIB:g}",
            r["way"],
            f"{r['ratio']:.2f}",
            f"{1e3 * r['out']['median_s']:.3f}",
            f"{1e3 * r['back']['median_s']:.3f}",
            f"{r['less_than_copy']:.0f} %",
            f"{r['less_than_save_on_cpu']:.0f} %",
            _number(r["of_bound"], "{:.2f}"),
            f"{r['host_us']:.0f}",
        ]
        for r in rows
    ]


def _training(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    headings = [
        *("model", "batch", "method", "peak allocated GiB", "peak reserved GiB", "step ms"),
        *("host RSS GiB", "of oracle's time"),
    ]
    return headings, [
        [
            r["model"],
            str(r["batch"]),
            r["method"],
            *([r["failure"], *[UNKNOWN] * 4] if r["failure"] else _figures(r)),
        ]
        for r in rows
    ]


def _figures(row: dict[str, Any]) -> list[str]:
    return [
        _number(row["peak_allocated_bytes"], "{:.2f}", GIB),
        _number(row["peak_reserved_bytes"], "{:.2f}", GIB),
        _number(row["step_ms"], "{:.1f}"),
        _number(row["host_rss_bytes"], "{:.2f}", GIB),
        _number(row["time_of_oracle"], "{:.2f}"),
    ]


def _number(value: float | None, form: str, unit: int = 1) -> str:
    return UNKNOWN if value is None else form.format(value / unit)


def _trace(rows: Sequence[dict[str, Any]]) -> tuple[list[str], list[list[str]]]:
    return ["model", "method", "operator", "calls", "host us", "device us"], [
        [
            r["model"],
            r["method"],
            r["name"],
            str(r["count"]),
            f"{r['host_us']:.0f}",
            f"{r['device_us']:.0f}",
        ]
        for r in rows
    ]


_TABLES: Final = {
    "codecs": _codecs,
    "link": _link,
    "swap": _swap,
    "training": _training,
    "trace": _trace,
}
