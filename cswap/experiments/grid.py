"""A table of results, for a terminal and for a page."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from cswap.report import terminal

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rich.console import Console


@dataclass(frozen=True, slots=True)
class Grid:
    """A table.

    Attributes:
        headings: headings of its columns.
        rows: rows with one cell per column.
        title: above it.
        notes: paragraphs below it.
    """

    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    title: str = ""
    notes: Sequence[str] = ()

    def show(self, console: Console, drop: Sequence[str] = ()) -> None:
        """Print it.

        Args:
            console: to print on.
            drop: columns that a narrow terminal does without, the first to go first.
        """
        from rich.table import Table

        table = Table(title=terminal.literal(self.title), caption=" ".join(self.notes))
        for i, heading in enumerate(self.headings):
            figures = i > 0 and all(row[i][:1] in "+-.0123456789" for row in self.rows)
            table.add_column(heading, justify="right" if figures else "left")
        terminal.add_rows(table, self.rows)
        terminal.show(table, drop=drop, console=console)
