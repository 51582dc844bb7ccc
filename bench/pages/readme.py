"""`python -m bench readme`: the tables of README.md and docs, made from committed result files.

A table stands between ``<!-- NAME -->`` and ``<!-- /NAME -->``; a stale one fails a test.
"""

from __future__ import annotations

import re
from typing import TYPE_CHECKING, Annotated, Final, NoReturn

import typer

from bench.codecs import tables as codec_report
from bench.gpu.build import build_table
from bench.gpu.static_tables import kernels_table
from bench.pages import decision_tables, first_picture, gpu_tables, step_tables, twin_tables
from bench.pages import experiment_tables as experiments
from bench.pages.committed import RESULTS
from bench.pages.committed import as_markdown as _markdown
from bench.pages.folding import folded
from bench.pages.versions import versions_table
from cswap.experiments.files.environment import ROOT
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from pathlib import Path

PAGES: Final = (
    ROOT / "README.md",
    *(
        ROOT / "docs" / f"{n}.md"
        for n in (
            "index",
            "benchmarks",
            "advisor",
            "lossy",
            "fit",
            "compile",
            *("gpu-first-run", "versions", "twin"),
        )
    ),
)
PICTURES: Final = {
    RESULTS / "advisor.png": ROOT / "docs" / "advisor.png",
    RESULTS / "swap.png": ROOT / "docs" / "swap.png",
    RESULTS / "fit.png": ROOT / "docs" / "fit-cpu.png",
    RESULTS / "accuracy" / "pareto.png": ROOT / "docs" / "lossy-pareto.png",
    RESULTS.parent / "twin" / "h200-pcie5.png": ROOT / "docs" / "twin-h200.png",
    **{
        RESULTS / f"codecs-{n}.png": ROOT / "docs" / f"codecs-{n}.png"
        for n in codec_report.PICTURES
    },
}
"""Committed pictures, and the paths of their copies in docs."""

FIRST_PICTURE: Final = ROOT / "docs" / "fit.png"
"""Drawn from several result files."""


def codec_pictures() -> str:
    """Ratios and rates of codecs as pictures."""
    return _pictures("pareto", "sizes")


def sparsity_pictures() -> str:
    """The codecs over the share of zeros as pictures."""
    return _pictures("sparsity-float32", "sparsity-bfloat16")


def _pictures(*names: str) -> str:
    return "\n\n".join(f"![{codec_report.PICTURES[n]}](codecs-{n}.png)" for n in names)


def results_table() -> str:
    """Every committed result file with the command that made it."""
    rows = []
    for path in sorted(RESULTS.parent.rglob("*.json")):
        e = read_object(path, "file").get("environment", {})
        when, commit = str(e.get("started", ""))[:10], str(e.get("cswap_commit") or "")[:7]
        file = path.relative_to(RESULTS.parent)
        rows.append([f"`{file}`", f"`{e.get('command', '?')}`", str(e.get("cpu")), when, commit])
    return _markdown(["file", "made by", "CPU", "on", "at commit"], rows)


TABLES: Final = {
    **experiments.TABLES,
    "gpu codecs": gpu_tables.codecs_table,
    "gpu link": gpu_tables.link_table,
    "gpu swap": gpu_tables.swap_table,
    "gpu training": gpu_tables.training_table,
    "twin": twin_tables.steps_tables,
    "twin validation": twin_tables.validation_table,
    "twin policies": twin_tables.policies_table,
    "twin largest": twin_tables.largest_table,
    "kernels": kernels_table,
    "kernel file": build_table,
    "results": results_table,
    "versions": versions_table,
    **decision_tables.TABLES,
    "demo": step_tables.demo_table,
    "transformer": step_tables.transformer_table,
    "codec pictures": codec_pictures,
    "sparsity pictures": sparsity_pictures,
    "swap": step_tables.swap_table,
    "workloads": step_tables.workloads_table,
    "more workloads": step_tables.more_workloads_table,
    "fit": step_tables.fit_table,
    "inlined": step_tables.inlined_table,
}


def filled(text: str) -> str:
    """The page with each of its tables made anew."""
    for name, make in TABLES.items():
        mark = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if mark.search(text):
            table = folded(make())
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
            _stale(page)
        page.write_text(new)
    for source, target in PICTURES.items():
        data = source.read_bytes() if source.exists() else b""
        if data and check and (not target.exists() or target.read_bytes() != data):
            _stale(target)
        if data and not check:
            target.write_bytes(data)
    if first_picture.is_stale(FIRST_PICTURE) and check:
        _stale(FIRST_PICTURE)
    if not check:
        first_picture.draw(FIRST_PICTURE)


def _stale(path: Path) -> NoReturn:
    typer.echo(f"{path.name} is stale: run `python -m bench readme`.", err=True)
    raise typer.Exit(1)
