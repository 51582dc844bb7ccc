"""`cswap bench report DIR`: every result file of a folder as one HTML page.

The page holds its pictures and its style, and so can be sent as one file.
"""

from __future__ import annotations

from pathlib import Path  # noqa: TC003 - typer reads it
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from cswap.experiments import html_page
from cswap.experiments.accuracy import pictures, pilot
from cswap.experiments.accuracy import report as accuracy
from cswap.experiments.codecs import tables as codecs
from cswap.experiments.files.reading import ResultFileError, load, understood
from cswap.experiments.files.resumable import SUFFIX
from cswap.experiments.files.writing import write_text
from cswap.experiments.grid import Grid
from cswap.experiments.html_page import Picture, Section
from cswap.experiments.options import RESULTS, writable_folder
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.experiments.files.reading import Document

TABLES: Final[dict[str, Callable[[Document], Sequence[Grid]]]] = {
    "codecs": codecs.grids,
    "accuracy": accuracy.grids,
    "accuracy pilot": pilot.grids,
}
"""Functions that make a document's tables, by its kind."""


def tables_of(document: Document) -> Sequence[Grid]:
    """The tables of a result; of other kinds than `TABLES`, the words and numbers of its rows.

    Raises:
        ResultFileError: the document has no rows.
    """
    make = TABLES.get(str(document.get("kind")))
    return (make(document) if make else ()) or [_plain(document)]


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


def sections(folder: Path) -> tuple[list[Section], list[str]]:
    """A section per result file below a folder, and a line on each JSON file that has none.

    Raises:
        ResultFileError: the folder cannot be listed, or there is no result file.
    """
    if not folder.is_dir():
        raise ResultFileError(f"{folder}: is no folder. Name one with result files.")
    made, notes = [], []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        if path.name.endswith(SUFFIX):
            notes.append(f"{name}: left out: unfinished. Repeat the command that began it.")
            continue
        try:
            made.append(_section(name, path))
        except ResultFileError as error:
            notes.append(f"{name}: left out: {error}")
    if not made:
        raise ResultFileError(
            f"{folder}: has no result file. `cswap bench codecs` and `cswap bench accuracy` write "
            f"some. {' '.join(notes)}".rstrip()
        )
    return made, notes


def _section(name: str, path: Path) -> Section:
    document = load(path)
    with understood(path):
        where = html_page.where(document["environment"])
        return Section(name, where, tables_of(document), pictures=_pictures(path))


def _pictures(result: Path) -> list[Picture]:
    # Those whose name begins with the result's; all of its folder, if no other result is there.
    alone = len(list(result.parent.glob("*.json"))) == 1 or result.stem == "results"
    pattern = "*.png" if alone else f"{result.stem}*.png"
    return [
        Picture(
            path.stem.replace("-", " "),
            pictures.ALT if path.stem == "pareto" else f"of {result.name}",
            path,
        )
        for path in sorted(result.parent.glob(pattern))
    ]


def write(folder: Path, out: Path | None = None) -> Path:
    """Write report.html, and print which files are left out.

    Args:
        folder: with result files; subfolders count.
        out: folder to write to; None: the same.

    Returns:
        The page's path.

    Raises:
        ConfigError: no result file is found, or nothing can be written.
    """
    made, notes = sections(folder)
    page = writable_folder(out or folder) / "report.html"
    left_out = [Section("Left out", notes=notes)] if notes else []
    write_text(page, html_page.render("cswap: results", [*made, *left_out]))
    for note in notes:
        Console().print(literal(note), soft_wrap=True)
    return page


def main(
    folder: Annotated[Path, typer.Argument(help="With result files; subfolders count.")] = RESULTS,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: the same.")] = None,
) -> None:
    """Put all tables and pictures of a folder of results into report.html."""
    Console().print(literal(f"Written: {write(folder, out)}"), soft_wrap=True)
