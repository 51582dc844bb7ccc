"""`python -m bench report DIR`: as `cswap bench report`, with the tables of all benchmarks."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import Annotated

import typer

from bench.gpu import tables
from bench.pages import readme
from cswap.experiments.pages import report


def main(
    folder: Annotated[Path, typer.Argument(help="With result files; subfolders count.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: the same.")] = None,
) -> None:
    """Put all tables and pictures of a folder of results into report.html and report.md."""
    report.write(folder, out, report.Makers(readme.TABLES, tables.markdown))
