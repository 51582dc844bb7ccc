"""Output of commands: rows as a table or as CSV, or plain data as JSON."""

from __future__ import annotations

import json
import sys
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cswap.display import visible
from cswap.report import terminal
from cswap.report.terminal import Format

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from rich.text import Text

Form = Annotated[Format, typer.Option("--format", help="How to print.")]
AsJson = Annotated[bool, typer.Option("--json", help="The same as --format json.")]


def emit(
    form: Format,
    columns: Sequence[str],
    rows: Iterable[Iterable[str | Text]],
    record: Callable[[], Any],
    notes: Iterable[str] = (),
    *,
    drop: Sequence[str] = (),
) -> None:
    """Print rows in the form that was asked for.

    Args:
        form: see `Format`.
        columns: headings.
        rows: of cells.
        record: makes the data that JSON shows.
        notes: lines below the table; beside CSV they go to stderr; JSON holds them itself.
        drop: columns that a narrow terminal does without, the first to go first.
    """
    if form is Format.JSON:
        print(json.dumps(record()))  # noqa: T201 - commands print
    elif form is Format.CSV:
        print(terminal.as_csv(columns, rows), end="")  # noqa: T201
        for note in notes:
            print(visible(note), file=sys.stderr)  # noqa: T201
    else:
        table = terminal.new_table(*columns)
        terminal.add_rows(table, rows)
        terminal.show(table, drop=drop)
        if lines := list(notes):
            terminal.say(*lines)


def chosen(form: Format, as_json: bool) -> Format:
    """The form that the two options name together."""
    return Format.JSON if as_json else form
