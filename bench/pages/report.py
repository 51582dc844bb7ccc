"""`python -m bench report DIR`: as `cswap bench report`, with the results of all benchmarks."""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any

import typer

from bench.codecs import tables as codecs
from cswap.experiments import results_page
from cswap.experiments.files.reading import ResultFileError
from cswap.experiments.grid import Grid

if TYPE_CHECKING:
    from collections.abc import Sequence

    from cswap.experiments.files.reading import Document


def tables_of(document: Document) -> Sequence[Grid]:
    """The tables of a result; of most kinds, the words and numbers of its rows as they are.

    Raises:
        ResultFileError: the document has no rows.
    """
    kind = document.get("kind")
    if kind == "codecs":
        return codecs.grids(document)
    return results_page.tables_of(document) if kind in results_page.TABLES else [_plain(document)]


def _plain(document: Document) -> Grid:
    values = (document.get("rows"), *document.values())
    rows = next((found for found in map(_rows, values) if found), None)
    if rows is None:
        raise ResultFileError("has no rows")
    columns = [key for key, value in rows[0].items() if not isinstance(value, list | dict)]
    return Grid(columns, [[_words(row.get(column)) for column in columns] for row in rows])


def _rows(value: Any) -> list[dict[str, Any]]:
    found = list(value.values()) if isinstance(value, dict) else value
    is_rows = isinstance(found, list) and all(isinstance(row, dict) for row in found)
    return found if is_rows else []


def _words(value: Any) -> str:
    return f"{value:.5g}" if isinstance(value, float) else "" if value is None else str(value)


def main(
    folder: Annotated[Path, typer.Argument(help="With result files; subfolders count.")],
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: the same.")] = None,
) -> None:
    """Put tables and pictures of a folder of results into report.html."""
    typer.echo(f"Written: {results_page.write(folder, out, tables_of)}")
