"""`python -m bench readme`: the tables of README.md and docs, made from committed result files.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; a stale one fails a test.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import typer

from bench.accuracy.report import markdown, number
from bench.accuracy.summary import current
from bench.codecs import tables as codec_report
from bench.codecs.cases import OWN
from bench.files.committed import RESULTS, ROOT, NotReadError, is_given
from bench.files.committed import as_markdown as _markdown
from bench.files.committed import load as _load
from bench.files.committed import where as _where
from bench.fit import report as fit_report
from bench.frameworks import report as frameworks_report
from bench.gpu.static_tables import kernels_table, targets_table
from bench.overhead import hook_costs
from bench.papers.report import HEADINGS, networks, summary
from bench.swap import report as swap_report
from cswap.errors import ConfigError
from cswap.schema.reading import read_object

PAGES: Final = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{n}.md" for n in ("benchmarks", "advisor", "lossy", "planning", "fit")),
)
PICTURES: Final = {
    RESULTS / "advisor.png": ROOT / "docs" / "advisor.png",
    RESULTS / "swap.png": ROOT / "docs" / "swap.png",
    RESULTS / "fit.png": ROOT / "docs" / "fit.png",
    RESULTS / "accuracy" / "pareto.png": ROOT / "docs" / "lossy-pareto.png",
    RESULTS / "papers.png": ROOT / "docs" / "papers.png",
    RESULTS / "accuracy" / "heat.png": ROOT / "docs" / "lossy-gradients.png",
    **{
        RESULTS / f"codecs-{n}.png": ROOT / "docs" / f"codecs-{n}.png"
        for n in codec_report.PICTURES
    },
}
"""Committed pictures, and the paths of their copies in docs."""

MIB: Final = 1 << 20

_SHOWN: Final = {
    "relu": ("zvc", "zvc+expk", "int8", "zvc+int8", "lz4", "zstd", "blosc2"),
    "gelu": ("expk", "int8", "fp8", "int4", "lz4", "zstd", "blosc2"),
    "mask": ("bitpack", "lz4", "zstd", "blosc2"),
    "index": ("bitpack", "lz4", "zstd", "blosc2"),
    "token": ("bitpack", "lz4", "zstd", "blosc2"),
}
"""Codecs in the README's table, by kind of data; docs/benchmarks.md has all."""


def demo_table() -> str:
    """The demo's comparison."""
    data = _load("demo.json")
    rows = [
        [
            f"{r['model']} {r['mode']}",
            f"{r['peak_saved_bytes'] / MIB:.1f}",
            f"{r['ratio']:.2f}",
            f"{r['step_time_rel']:.2f}",
            f"{r['final_loss']:.4f}",
            f"{100 * r['accuracy']:.1f}",
            "yes" if r["bit_equal"] else "no",
            f"{r['max_grad_diff']:.1e}",
        ]
        for r in data["rows"]
    ]
    headings = ["run", "peak saved MiB", "raw / encoded", "step time, off = 1", "val. loss"]
    headings += ["accuracy %", "bit-equal to off", "largest gradient difference"]
    return _markdown(headings, rows) + "\n\n" + _where(data, "demo.json")


def _codec_rows(rows: list[dict[str, Any]]) -> list[list[str]]:
    return [
        [
            f"{r['data']} {r['dtype']}",
            f"`{r['codec']}`",
            f"{r['ratio']:.2f}",
            f"{r['encode_gb_per_s']:.1f}",
            f"{r['encode_of_memcpy']:.2f}",
            f"{r['decode_gb_per_s']:.1f}",
            f"{r['decode_of_memcpy']:.2f}",
            "" if r["lossless"] else f"{r['relative_rms_error']:.1e}",
        ]
        for r in rows
    ]


_CODEC_HEADINGS: Final = [
    "data",
    "codec",
    "ratio",
    "encode GB/s",
    "of memcpy",
    "decode GB/s",
    "of memcpy",
    "relative RMS error",
]


def _of_families(*families: str) -> dict[str, Any]:
    # The codecs' results on these families of data; a file without any has no such table.
    data = _load("codecs.json")
    rows = [r for r in data["rows"] if r.get("family", "recorded") in families]
    if not rows:
        raise NotReadError(", ".join(families))
    return {**data, "rows": rows}


def codec_table() -> str:
    """The codecs that matter on each kind of data."""
    data = _of_families("recorded")
    shown = [
        r
        for r in data["rows"]
        if r["codec"] in _SHOWN.get(r["data"], ()) and r["dtype"] != "bfloat16"
    ]
    return _markdown(_CODEC_HEADINGS, _codec_rows(shown)) + "\n\n" + _where(data, "codecs.json")


def all_codecs_table() -> str:
    """Every codec on every recorded tensor."""
    data = _of_families("recorded", OWN)
    return (
        _markdown(_CODEC_HEADINGS, _codec_rows(data["rows"])) + "\n\n" + _where(data, "codecs.json")
    )


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
    data = _of_families("recorded")
    found = {(r["codec"], f"{r['data']} {r['dtype']}"): r for r in data["rows"]}
    rows = []
    for codec, kind in _OWN_KIND:
        ours, lz4, zstd = (found[name, kind] for name in (codec, "lz4", "zstd"))
        faster = [f"{ours['encode_gb_per_s'] / r['encode_gb_per_s']:.1f}" for r in (lz4, zstd)]
        ratios = [f"{r['ratio']:.2f}" for r in (ours, lz4, zstd)]
        rows.append([f"`{codec}` on {kind}", *faster, *ratios])
    headings = ["codec and data", "encode rate / lz4's", "/ zstd's", "ratio", "lz4's", "zstd's"]
    return _markdown(headings, rows) + "\n\n" + _where(data, "codecs.json")


def crossovers_table() -> str:
    """The shares of zeros at which sparse codecs change places."""
    return _synthetic(codec_report.crossover_lines(_load("codecs.json")))


def values_table() -> str:
    """Ratios of lossless codecs by distribution of values."""
    return _synthetic(codec_report.value_lines(_load("codecs.json")))


def _synthetic(lines: list[list[str]]) -> str:
    if not lines and is_given():
        raise NotReadError("sparsity, values")
    if not lines:
        return "Not in `bench/results/cpu/codecs.json` yet: `python -m bench codecs` measures it."
    where = _where(_load("codecs.json"), "codecs.json")
    return f"{_markdown(lines[0], lines[1:])}\n\n{where}"


def codec_pictures() -> str:
    """The pictures beside the result file."""
    return codec_report.picture_links(RESULTS, "codecs") or "No pictures have been drawn yet."


def overhead_table() -> str:
    """The cost of the hooks."""
    data = _load("overhead.json")
    rows = [[name, f"{us:.1f}"] for name, us in data["microseconds"].items()]
    return _markdown(["pack + unpack of", "us"], rows) + "\n\n" + _where(data, "overhead.json")


def hooks_table() -> str:
    """The whole cost of hooks, cswap's and others'."""
    data = _load("overhead.json")
    if "rows" not in data:
        return "Not in `bench/results/cpu/overhead.json` yet: `python -m bench overhead` adds it."
    rows = [hook_costs.figures(row) for row in data["rows"]]
    headings = ["hooks", "tensor", "us", "20 % ... 80 %"]
    notes = f"{hook_costs.NOTE} {_where(data, 'overhead.json')}"
    return f"{_markdown(headings, rows)}\n\n{notes}"


def swap_table() -> str:
    """Training steps in every way to swap or recompute."""
    try:
        data = _load("swap.json")
    except FileNotFoundError:
        return "No `bench/results/cpu/swap.json` yet: `python -m bench swap` writes it."
    rows = swap_report.cells(data)
    shown = "![step time over off's against peak bytes of saved tensors](swap.png)\n\n"
    notes = f"{swap_report.NOTE} {_where(data, 'swap.json')}"
    return f"{_markdown(list(swap_report.HEADINGS), rows)}\n\n{shown}{notes}"


def fit_table() -> str:
    """Memory goals, held by cswap and by checkpointing."""
    try:
        data = _load("fit.json")
    except ConfigError:
        return "Not measured yet: `python -m bench fit` does."
    shown = "![step time over off's against the peak of memory](fit.png)\n\n"
    notes = f"{fit_report.NOTE} {_where(data, 'fit.json')}"
    return f"{_markdown(list(fit_report.HEADINGS), fit_report.cells(data))}\n\n{shown}{notes}"


def advisor_table() -> str:
    """The cost of the advisor's choices, against the best choices."""
    data = _load("advisor.json")
    keys = ("advisor_s", "best_static_s", "cswap_plus_s", "raw_s")
    rows = [
        [
            f"{r['model']}, {r['mode']}",
            r["machine"] + (" *" if r["simulated"] else ""),
            f"{1e3 * r['oracle_s']:.1f}",
            *(f"{r[key] / r['oracle_s']:.3f}" for key in keys),
            f"`{r['best_static']}`",
        ]
        for r in data["cells"]
    ]
    headings = ["model, lossy codecs", "machine", "oracle, ms", "advisor", "best static", "CSwap+"]
    return (
        _markdown([*headings, "raw", "which static"], rows) + "\n\n" + _where(data, "advisor.json")
    )


def prediction_table() -> str:
    """Predicted against true ratios."""
    data = _load("advisor.json")
    rows = [
        [f"`{codec}`", f"{r['median']:.1%}", f"{r['largest']:.1%}", f"{r['tensors']:.0f}"]
        for codec, r in data["prediction"].items()
    ]
    headings = ["codec", "median error", "largest error", "tensors"]
    return _markdown(headings, rows) + "\n\n" + _where(data, "advisor.json")


def forced_table() -> str:
    """Training with auto and with every codec forced."""
    data = _load("advisor.json")
    rows = [
        [
            f"{model} `{codec}`",
            *(f"{1e3 * r[key]:.1f}" for key in ("cost_s", "device_s", "hooks_s")),
            f"{r['held_bytes'] / MIB:.1f}",
        ]
        for model, found in data["training"].items()
        for codec, r in found.items()
    ]
    headings = ["model, codec", "cost of a step, ms", "codecs, ms", "hooks, ms", "held, MiB"]
    decided = f"Deciding took {data['decision_us']:.1f} us per tensor, samples included. "
    return _markdown(headings, rows) + "\n\n" + decided + _where(data, "advisor.json")


def accuracy_table() -> str:
    """The effect of lossy swapping on accuracy."""
    data = _load("accuracy/results.json")
    return markdown(data) + "\n" + _where(data, "accuracy/results.json")


def short_accuracy_table() -> str:
    """The same for the README: change of the loss, verdict, bytes."""
    data = current(_load("accuracy/results.json"))
    rows = [
        [
            f"{r['model']} {r['policy']}",
            number(r["loss"]["mean"], "+.4f"),
            r["verdict"],
            f"{r['eligible_bytes'] / r['held_bytes']:.2f}",
        ]
        for r in data["summary"]
        if r["policy"] != "off"
    ]
    headings = ["model, policy", "change of validation loss", "verdict", "raw / held bytes"]
    return _markdown(headings, rows) + "\n\n" + _where(data, "accuracy/results.json")


def plans_table() -> str:
    """Policies on models, machines and budgets, simulated."""
    data = _load("plans.json")
    policies = data["policies"]
    rows = [
        [
            f"{c['model']}, batch {c['batch']}",
            c["hardware"],
            f"{c['budget_bytes'] / 2**30:.1f} GiB",
            *(_of_ideal(c, p) for p in policies),
        ]
        for c in data["cells"]
    ]
    return (
        _markdown(["model", "machine", "budget", *policies], rows)
        + "\n\n"
        + _where(data, "plans.json")
    )


def _of_ideal(cell: dict[str, Any], policy: str) -> str:
    if not (share := cell["of_ideal"].get(policy)):
        return "-"
    return f"{share:.1%}" + "*" * (policy in cell.get("simulated_only", ()))


def papers_table() -> str:
    """The papers' figures beside ours."""
    data = _load("papers.json")
    return _markdown(HEADINGS, summary(data)) + "\n\n" + _where(data, "papers.json")


def paper_networks_table() -> str:
    """CSwap+ network by network."""
    data = _load("papers.json")
    headings = ["network", "data, GPU", "vDNN published", "vDNN ours", "CSwap+ / vDNN published"]
    headings += ["ours", "SC / vDNN, ours", "instant codec published", "ours"]
    headings += ["ours if copies queue", "swap latency, less by"]
    return _markdown(headings, networks(data)) + "\n\n" + _where(data, "papers.json")


def results_table() -> str:
    """Every committed result file with the command that made it."""
    rows = []
    for path in sorted(RESULTS.parent.rglob("*.json")):
        e = read_object(path, "file").get("environment", {})
        when, commit = str(e.get("started", ""))[:10], str(e.get("cswap_commit") or "")[:7]
        file = path.relative_to(RESULTS.parent)
        rows.append([f"`{file}`", f"`{e.get('command', '?')}`", str(e.get("cpu")), when, commit])
    return _markdown(["file", "made by", "CPU", "on", "at commit"], rows)


def workloads_table() -> str:
    """Models of other packages, trained in every way."""
    try:
        data = _load("workloads.json")
    except ConfigError:
        return "Not in `bench/results/cpu` yet: `python -m bench workloads` measures it."
    table = _markdown(frameworks_report.HEADINGS, frameworks_report.cells(data))
    words = f"{frameworks_report.summary(data)} {frameworks_report.NOTE}"
    return f"{table}\n\n{words} {_where(data, 'workloads.json')}"


TABLES: Final = {
    "kernels": kernels_table,
    "kernel targets": targets_table,
    "papers": papers_table,
    "paper networks": paper_networks_table,
    "results": results_table,
    "accuracy": accuracy_table,
    "short accuracy": short_accuracy_table,
    "plans": plans_table,
    "advisor": advisor_table,
    "prediction": prediction_table,
    "forced": forced_table,
    "demo": demo_table,
    "codecs": codec_table,
    "all codecs": all_codecs_table,
    "peers": peers_table,
    "crossovers": crossovers_table,
    "values": values_table,
    "codec pictures": codec_pictures,
    "overhead": overhead_table,
    "hooks": hooks_table,
    "swap": swap_table,
    "workloads": workloads_table,
    "fit": fit_table,
}


def filled(text: str) -> str:
    """The page with each of its tables made anew."""
    for name, make in TABLES.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if mark.search(text):
            table = make()
            text = mark.sub(lambda m, table=table: f"{m[1]}{table}\n{m[2]}", text)  # type: ignore[misc]
    return text


def main(
    check: Annotated[bool, typer.Option(help="Change nothing; exit 1 if stale.")] = False,
) -> None:
    """Fill the tables of README.md and docs from the committed results."""
    for page in PAGES:
        text = page.read_text()
        new = filled(text)
        if new != text and check:
            typer.echo(f"{page.name} is stale: run `python -m bench readme`.", err=True)
            raise typer.Exit(1)
        page.write_text(new)
    for source, target in PICTURES.items():
        data = source.read_bytes() if source.exists() else b""
        if data and check and (not target.exists() or target.read_bytes() != data):
            typer.echo(f"{target.name} is stale: run `python -m bench readme`.", err=True)
            raise typer.Exit(1)
        if data and not check:
            target.write_bytes(data)
