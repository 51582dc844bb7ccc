"""The tables of docs/advisor.md, in Markdown, from the committed result file."""

from __future__ import annotations

from bench.drawing.steps import MIB
from bench.pages.committed import as_markdown, load, where


def advisor_table() -> str:
    """The cost of the advisor's choices, against the best choices."""
    data = load("advisor.json")
    keys = ("advisor_s", "best_static_s", "cswap_plus_s", "raw_s")
    rows = [
        [
            f"{r['model']}{' (unseen)' * r.get('unseen', False)}, {r['mode']}",
            r["machine"] + (" *" if r["simulated"] else ""),
            f"{1e3 * r['oracle_s']:.1f}",
            *(f"{r[key] / r['oracle_s']:.3f}" for key in keys),
            f"`{r['best_static']}`",
        ]
        for r in data["cells"]
    ]
    headings = ["model, lossy codecs", "machine", "oracle, ms", "advisor", "best static", "CSwap+"]
    return (
        as_markdown([*headings, "raw", "which static"], rows) + "\n\n" + where(data, "advisor.json")
    )


def prediction_table() -> str:
    """Predicted against true ratios."""
    data = load("advisor.json")
    rows = [
        [f"`{codec}`", f"{r['median']:.1%}", f"{r['largest']:.1%}", f"{r['tensors']:.0f}"]
        for codec, r in data["prediction"].items()
    ]
    headings = ["codec", "median error", "largest error", "tensors"]
    return as_markdown(headings, rows) + "\n\n" + where(data, "advisor.json")


def forced_table() -> str:
    """Training with auto and with every codec forced."""
    data = load("advisor.json")
    rows = [
        [
            f"{model} `{codec}`",
            *(f"{1e3 * r[key]:.1f}" for key in ("cost_s", "device_s", "hooks_s")),
            f"{r['peak_bytes'] / MIB:.1f}",
        ]
        for model, found in data["training"].items()
        for codec, r in found.items()
    ]
    headings = ["model, codec", "cost of a step, ms", "codecs, ms", "hooks, ms", "peak, MiB"]
    return as_markdown(headings, rows) + "\n\n" + where(data, "advisor.json")
