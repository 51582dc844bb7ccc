"""Tables on a terminal. Cells are shown literally: no markup, no control characters."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.display import visible

if TYPE_CHECKING:
    from collections.abc import Iterable

    from rich.table import Table
    from rich.text import Text


def new_table(*columns: str) -> Table:
    """An empty table without lines; long cells are folded."""
    from rich.table import Table

    table = Table(box=None, header_style="bold", pad_edge=False)
    for i, column in enumerate(columns):
        table.add_column(column, overflow="fold", no_wrap=i == 0)
    return table


def literal(text: str, style: str = "") -> Text:
    r"""Text that is shown literally: without rich's markup, links and emoji, or terminal commands.

    >>> literal("[red]conv\x1b[1m:smile:").plain
    '[red]conv\\x1b[1m:smile:'
    """
    from rich.text import Text

    return Text(visible(text), style)


def add_rows(table: Table, rows: Iterable[Iterable[str]]) -> None:
    """Add rows of literal cells."""
    for row in rows:
        table.add_row(*map(literal, row))


def show(table: Table) -> None:
    """Print a table on stdout."""
    from rich.console import Console

    Console().print(table)


def say(*lines: str) -> None:
    """Print lines on stdout."""
    print(*map(visible, lines), sep="\n")  # noqa: T201 - the one place of reports that prints
