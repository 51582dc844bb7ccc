"""Long tables behind a line that opens them, on GitHub and in the built pages."""

from __future__ import annotations

import re
from typing import Final

MOST_ROWS: Final = 20
"""Rows of a table that is shown at once."""

_TABLE: Final = re.compile(r"(?:^\|.*\|$\n?)+", re.MULTILINE)


def folded(text: str) -> str:
    """The Markdown with every table of more than `MOST_ROWS` rows folded.

    ``markdown="1"`` lets the extension `md_in_html` read the table; GitHub reads it because of the
    blank lines.

    >>> long = "| a |\\n| --- |\\n" + "| 1 |\\n" * 21
    >>> folded(long).splitlines()[:4]
    ['<details markdown="1">', '<summary>The table: 21 rows</summary>', '', '| a |']
    >>> folded("| a |\\n| --- |\\n| 1 |")
    '| a |\\n| --- |\\n| 1 |'
    """
    return _TABLE.sub(_fold, text)


def _fold(match: re.Match[str]) -> str:
    table = match[0].rstrip("\n")
    n_rows = table.count("\n") - 1  # headings and rule are none
    if n_rows <= MOST_ROWS:
        return match[0]
    after = match[0][len(table) :]
    head = f'<details markdown="1">\n<summary>The table: {n_rows} rows</summary>'
    return f"{head}\n\n{table}\n\n</details>{after}"
