"""Tables on a terminal. Cells are shown literally: no markup, no control characters.

Note [tables and widths]
~~~~~~~~~~~~~~~~~~~~~~~~
A terminal that is too narrow for all columns gets fewer columns, and a line that names the missing
ones. The other columns are shown whole; only long texts are wrapped between words. A pipe has no
width: there every row is one line.
"""

from __future__ import annotations

import csv
import io
from enum import Enum
from typing import TYPE_CHECKING, Final

from cswap.display import visible

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from rich.console import Console
    from rich.table import Column, Table
    from rich.text import Text

MOST_WORD: Final = 40
"""Characters of a word that a column is not narrower than; longer words are broken."""

TEXT_WIDTH: Final = 24
"""Characters that a text is given at least where it has to be wrapped."""


class Format(str, Enum):
    """Ways to print rows."""

    TABLE = "table"
    CSV = "csv"
    JSON = "json"


def new_table(*columns: str) -> Table:
    """An empty table without lines; long cells are folded."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def literal(text: str, style: str = "") -> Text:
    r"""Text that is shown literally: without rich's markup, links and emoji, or terminal commands.

    >>> literal("[red]conv\x1b[1m:smile:").plain
    '[red]conv\\x1b[1m:smile:'
    """
    from rich.text import Text

    return Text(visible(text), style)


def add_rows(table: Table, rows: Iterable[Iterable[str | Text]]) -> None:
    """Add rows of cells; strings are taken literally."""
    for row in rows:
        table.add_row(*(literal(cell) if isinstance(cell, str) else cell for cell in row))


def show(table: Table, *, drop: Sequence[str] = (), console: Console | None = None) -> None:
    """Print a table. See Note [tables and widths].

    Args:
        table: to print; its columns are changed.
        drop: headings of the columns that a narrow terminal does without, the first to go first.
            Others follow from the right; the first column stays.
        console: to print on; default: stdout.
    """
    from rich.console import Console
    from rich.measure import Measurement

    console = console or Console()
    if not console.is_terminal:
        found = Measurement.get(console, console.options.update(width=1 << 16), table)
        width = max(found.maximum, console.width)
        Console(file=console.file, width=width, quiet=console.quiet).print(table)
        return
    missing = fit(table, console, drop)
    console.print(table)
    if missing:
        names = ", ".join(map(visible, missing))
        console.print(literal(f"Left out for lack of width: {names}."), soft_wrap=True)


def as_text(table: Table) -> str:
    """A table as text, every row on one line."""
    from rich.console import Console

    out = io.StringIO()
    show(table, console=Console(file=out))
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines())


def fit(table: Table, console: Console, drop: Sequence[str] = ()) -> list[str]:
    """Drop columns until the others fit, and set their widths; returns the headings dropped."""
    missing: list[str] = []
    columns, widths = table.columns, [_widths(column, console) for column in table.columns]
    while len(columns) > 1 and sum(least for least, _ in widths) + _between(table) > console.width:
        by_name = {str(column.header): i for i, column in enumerate(columns) if i}
        gone = next((by_name[name] for name in drop if name in by_name), len(columns) - 1)
        missing.append(str(columns.pop(gone).header))
        widths.pop(gone)
    spare = console.width - _between(table) - sum(least for least, _ in widths)
    for i in sorted(range(len(columns)), key=lambda i: widths[i][1]):
        least, most = widths[i]
        columns[i]._index = i  # noqa: SLF001 - rich has no way to take a column out
        columns[i].width = min(most, least + max(0, spare))
        spare -= columns[i].width - least  # type: ignore[operator] # it was just set
    return missing


def _widths(column: Column, console: Console) -> tuple[int, int]:
    # Characters below which a column would not be readable, and those without a wrapped line.
    from rich.measure import measure_renderables

    options = console.options.update(width=1 << 16)
    word, most = measure_renderables(console, options, [column.header, *column.cells])
    word = min(word, MOST_WORD)
    return min(most, MOST_WORD if column.no_wrap else max(TEXT_WIDTH, word)), most


def _between(table: Table) -> int:
    # Characters of padding and lines.
    n = len(table.columns)
    _top, right, _bottom, left = table.padding
    edges = (left + right) * n - (0 if table.pad_edge else left + right)
    return edges if table.box is None else edges + n + 1


def as_csv(columns: Iterable[str], rows: Iterable[Iterable[str | Text]]) -> str:
    r"""Rows as comma-separated values, with a line of headings.

    >>> as_csv(["codec", "why"], [["zvc", "zeros, many"]])
    'codec,why\nzvc,"zeros, many"\n'
    """
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    writer.writerow(map(visible, columns))
    for row in rows:
        writer.writerow(visible(cell if isinstance(cell, str) else cell.plain) for cell in row)
    return out.getvalue()


def say(*lines: str) -> None:
    """Print lines on stdout."""
    print(*map(visible, lines), sep="\n")  # noqa: T201 - the one place of reports that prints
