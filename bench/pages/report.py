"""`python -m bench report DIR`: as `cswap bench report`, with the results of all benchmarks."""

from __future__ import annotations

from functools import partial
from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated

import typer

from bench.codecs import tables as codecs
from bench.files.kinds import KINDS, Figure, Kind, figure, rows_of
from cswap.experiments import results_page
from cswap.experiments.grid import Grid

if TYPE_CHECKING:
    from cswap.experiments.files.reading import Document


def grids(kind: Kind, document: Document) -> list[Grid]:
    """The table of any result: a row's name and the figures by which files are compared."""
    cells = [
        [" ".join(key), *(_words(figure(row, name)) for name in kind.figures)]
        for key, row in rows_of(kind, document).items()
    ]
    return [Grid([", ".join(kind.key), *kind.figures], cells)]


def _words(found: Figure | None) -> str:
    return "" if found is None else f"{found.value:.5g}"


def main(
    folder: Annotated[Path, typer.Argument(help="With result files; subfolders count.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: the same.")] = None,
) -> None:
    """Put tables and pictures of a folder of results into report.html."""
    of_kinds = {kind.name: partial(grids, kind) for kind in KINDS}
    tables: results_page.Tables = {**of_kinds, **results_page.TABLES, "codecs": codecs.grids}
    typer.echo(f"Written: {results_page.write(folder, out, tables)}")
