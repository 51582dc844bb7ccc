"""`python -m bench readme`: the tables of README.md and docs, made from committed result files.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; a stale one fails a test.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Final

import typer

from bench.drawing.steps import MIB, UNKNOWN
from bench.fit import report as fit_report
from bench.frameworks import report as frameworks_report
from bench.gpu.build import build_table
from bench.gpu.static_tables import kernels_table, targets_table
from bench.inlined import report as inlined_report
from bench.overhead import hook_costs
from bench.papers.report import HEADINGS, networks, summary
from bench.swap import report as swap_report
from cswap.errors import ConfigError
from cswap.experiments.codecs import tables as codec_report
from cswap.experiments.files.committed import RESULTS, ROOT
from cswap.experiments.files.committed import as_markdown as _markdown
from cswap.experiments.files.committed import load as _load
from cswap.experiments.files.committed import where as _where
from cswap.experiments.pages import tables as experiments
from cswap.schema.reading import read_object

PAGES: Final = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{n}.md"
        for n in ("benchmarks", "advisor", "lossy", "planning", "fit", "compile", "gpu-first-run")
    ),
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


def schedule_table() -> str:
    """Rates of ZFP that change in the course of training."""
    data = _load("accuracy/schedule.json")
    rows = []
    for r in data["rows"]:
        change = r["against_down"]
        rows.append(
            [
                r["schedule"],
                UNKNOWN if r["bits_per_value"] is None else f"{r['bits_per_value']:.0f}",
                f"{r['encoded_bytes_per_step'] / MIB:.2f}",
                f"{r['validation_loss']:.4f}",
                f"{change['mean']:+.4f} [{change['low']:+.4f}, {change['high']:+.4f}]",
                r["verdict"],
                f"{100 * r['accuracy']:.1f}",
            ]
        )
    headings = ["schedule", "mean bits per value", "encoded MiB per step", "val. loss"]
    headings += ["against sliding down (90 % CI)", "verdict", "accuracy %"]
    margin = f"Margin: {data['settings']['margin']} nats."
    return f"{_markdown(headings, rows)}\n\n{margin} {_where(data, 'accuracy/schedule.json')}"


def inlined_table() -> str:
    """Compiled models with codecs inside of their graphs."""
    try:
        data = _load("inlined.json")
    except ConfigError:
        return "Not measured yet: `python -m bench inlined` does."
    notes = f"{inlined_report.NOTE} {_where(data, 'inlined.json')}"
    return f"{_markdown(list(inlined_report.HEADINGS), inlined_report.cells(data))}\n\n{notes}"


def advisor_table() -> str:
    """The cost of the advisor's choices, against the best choices."""
    data = _load("advisor.json")
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
    **experiments.TABLES,
    "kernels": kernels_table,
    "kernel file": build_table,
    "kernel targets": targets_table,
    "papers": papers_table,
    "paper networks": paper_networks_table,
    "results": results_table,
    "plans": plans_table,
    "advisor": advisor_table,
    "prediction": prediction_table,
    "forced": forced_table,
    "demo": demo_table,
    "codec pictures": codec_pictures,
    "overhead": overhead_table,
    "hooks": hooks_table,
    "swap": swap_table,
    "workloads": workloads_table,
    "fit": fit_table,
    "inlined": inlined_table,
    "schedule": schedule_table,
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
