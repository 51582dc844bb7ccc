"""The tables of docs/advisor.md, in Markdown, from the committed result file."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING, Any, Final

from bench.advisor import report
from bench.pages.committed import as_markdown, load, where

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

FILE: Final = "advisor.json"


def _table(
    headings: Sequence[str], cells: Callable[[dict[str, Any]], Iterable[Sequence[str]]]
) -> str:
    data = load(FILE)
    return f"{as_markdown(headings, cells(data))}\n\n{where(data, FILE)}"


TABLES: Final[dict[str, Callable[[], str]]] = {
    "advisor": partial(_table, report.HEADINGS, report.cells),
    "prediction": partial(_table, report.PREDICTION_HEADINGS, report.prediction_cells),
}
"""Functions that make the tables, by name."""
