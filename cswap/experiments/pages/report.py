"""`cswap bench report DIR`: every result file of a folder as one HTML page and as Markdown.

The page holds its pictures and its style, and so can be sent as one file.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer
from rich.console import Console

from cswap.display import visible_lines
from cswap.experiments.drawing import html_page as page
from cswap.experiments.drawing.html_page import Grid, Picture, Section
from cswap.experiments.files.committed import NotReadError, as_markdown, reading
from cswap.experiments.files.kinds import FILES, ResultFileError, kind_of, load, understood
from cswap.experiments.files.resumable import SUFFIX
from cswap.experiments.files.writing import write_text
from cswap.experiments.options import RESULTS, writable_folder
from cswap.experiments.pages.tables import TABLES
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping

    from cswap.experiments.files.kinds import Document

TITLE: Final = "cswap: benchmarks"
OUTPUTS: Final = ("report.html", "report.md")

_ROW: Final = re.compile(r"^\|(.*)\|\s*$")
_LINK: Final = re.compile(r"!\[[^\]]*\]\([^)]*\)")


@dataclass(frozen=True, slots=True)
class Makers:
    """The functions that make tables in Markdown.

    Attributes:
        tables: by name; each reads its result files by `committed.load`.
        of_part: of a document that is one part of several, as those of GPUs are; None: there is no
            table for it.
    """

    tables: Mapping[str, Callable[[], str]]
    of_part: Callable[[Document], str] | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """One result file.

    Attributes:
        path: path of the file.
        name: path relative to the folder.
        document: its content.
        canonical: path of a file of its kind among the committed results.
    """

    path: Path
    name: str
    document: Document
    canonical: str


def results(folder: Path) -> tuple[list[Result], list[str]]:
    """The result files below a folder, and a line on each JSON file that is none.

    Raises:
        ResultFileError: the folder cannot be listed, or there is no result file.
    """
    if not folder.is_dir():
        raise ResultFileError(f"{folder}: is no folder. Name one with result files.")
    found, notes = [], []
    for path in sorted(folder.rglob("*.json")):
        name = path.relative_to(folder).as_posix()
        if path.name.endswith(SUFFIX):
            notes.append(f"{name}: left out: unfinished. Repeat the command that began it.")
            continue
        try:
            document = load(path)
            canonical = FILES[kind_of(document, path)]
        except ResultFileError as error:
            notes.append(f"{name}: left out: {error}")
            continue
        found.append(Result(path, name, document, canonical))
    if not found:
        raise ResultFileError(
            f"{folder}: has no result file. `cswap bench codecs` and `cswap bench accuracy` write "
            "some."
        )
    return found, notes


def sections(folder: Path, found: list[Result], makers: Makers) -> list[Section]:
    """A section per result file."""
    pictures = _pictures(folder, found)
    made = []
    for result in found:
        tables, notes = _tables(result, makers)
        where = page.where(result.document["environment"])
        made.append(Section(result.name, where, tables, notes, pictures.pop(result.name, ())))
    if left := pictures.pop("", None):
        made.append(Section("Other pictures", pictures=left))
    return made


def _tables(result: Result, makers: Makers) -> tuple[list[Grid], list[str]]:
    if makers.of_part is not None and "part" in result.document:
        try:
            with understood(result.path):
                return [_grid("", makers.of_part(result.document))], []
        except ResultFileError as error:
            return [], [str(error)]
    tables, notes = [], []
    for name, make in makers.tables.items():
        with reading({result.canonical: result.path}) as read:
            try:
                with understood(result.path):
                    text = make()
            except NotReadError:
                continue  # a table of another file
            except ResultFileError as error:
                # A partial or an older file may lack fields of a table.
                if result.canonical in read:
                    notes.append(f"Table {name!r}: cannot be made: {error}")
                continue
            if result.canonical in read:
                tables.append(_grid((make.__doc__ or name).splitlines()[0].rstrip("."), text))
    if not tables and not notes:
        notes.append("There is no table of this kind of file.")
    return tables, notes


def _grid(title: str, markdown: str) -> Grid:
    lines = [match[1] for line in markdown.splitlines() if (match := _ROW.match(line))]
    cells = [[_plain(cell) for cell in line.split("|")] for line in lines]
    rest = (line.strip() for line in markdown.splitlines() if not _ROW.match(line))
    # Pictures of the docs are not here; those of the folder are shown below.
    notes = [_plain(text) for line in rest if (text := _LINK.sub("", line).strip())]
    return Grid(cells[0] if cells else [], cells[2:], title, notes)


def _plain(cell: str) -> str:
    return cell.strip().removeprefix("- ").replace("`", "").replace("**", "")


def _pictures(folder: Path, found: list[Result]) -> dict[str, list[Picture]]:
    # By the name of the result that they belong to: of its stem, or alone with it in a folder.
    grouped: dict[str, list[Picture]] = {}
    for path in sorted(folder.rglob("*.png")):
        owner = _owner(path, found)
        title = path.stem.replace("-", " ")
        picture = Picture(title, f"{title}: picture of {owner or folder.name}", path)
        grouped.setdefault(owner, []).append(picture)
    return grouped


def _owner(path: Path, found: list[Result]) -> str:
    here = [result for result in found if result.path.parent == path.parent]
    stems = [
        result
        for result in here
        if path.stem == result.path.stem or path.stem.startswith(f"{result.path.stem}-")
    ]
    if stems:
        return max(stems, key=lambda result: len(result.path.stem)).name
    return here[0].name if len(here) == 1 else ""


def markdown(target: Path, made: list[Section], notes: list[str]) -> str:
    """The same as Markdown; pictures by their paths from the target's folder."""
    blocks = [f"# {TITLE}", *_blocks(target, made), *notes]
    return "\n\n".join(map(visible_lines, blocks)) + "\n"


def _blocks(target: Path, made: list[Section]) -> Iterator[str]:
    for section in made:
        yield f"## {section.title}"
        if section.where:
            yield section.where
        for table in section.tables:
            if table.title:
                yield f"### {table.title}"
            if table.headings:
                yield as_markdown(table.headings, table.rows)
            yield from table.notes
        yield from section.notes
        for picture in section.pictures:
            yield f"![{picture.alt}]({Path(os.path.relpath(picture.path, target)).as_posix()})"


def write(folder: Path, out: Path | None, makers: Makers) -> None:
    """Write report.html and report.md, and print the files that are left out.

    Args:
        folder: with result files; subfolders count.
        out: folder to write to; None: the same.
        makers: make the tables.

    Raises:
        ConfigError: no result file is found, or nothing can be written.
    """
    found, notes = results(folder)
    target = writable_folder(out or folder)
    made = sections(folder, found, makers)
    shown: list[Any] = [*made, *([Section("Left out", notes=notes)] if notes else [])]
    html, md = (target / name for name in OUTPUTS)
    write_text(html, page.render(TITLE, shown))
    write_text(md, markdown(target, made, notes).rstrip("\n"))
    console = Console()
    for note in (*notes, f"Written: {html}, {md}"):
        console.print(literal(note))


def main(
    folder: Annotated[Path, typer.Argument(help="With result files; subfolders count.")] = RESULTS,
    out: Annotated[Path | None, typer.Option(help="Folder to write to; default: the same.")] = None,
) -> None:
    """Put all tables and pictures of a folder of results into report.html and report.md."""
    write(folder, out, Makers(TABLES))
