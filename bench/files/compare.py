"""`python -m bench compare A.json B.json`: two results of one command, row by row."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path  # noqa: TC003 - typer reads the annotations
from typing import TYPE_CHECKING, Annotated, Final

import typer
from rich import box
from rich.console import Console
from rich.table import Table

from bench.files.kinds import Figure, Kind, figure, kind_of, rows_of
from cswap.experiments.files.reading import ResultFileError, load
from cswap.report import terminal
from cswap.report.terminal import literal

if TYPE_CHECKING:
    from bench.files.kinds import Fields
    from cswap.experiments.files.reading import Document

NOTE: Final = (
    "B / A of the medians. same: the spreads of A and B (in brackets) overlap; less, more: they do "
    "not, or a file has none."
)


class Verdict(str, Enum):
    """Verdicts on one figure of two files."""

    LESS = "less"
    MORE = "more"
    SAME = "same within spread"
    EQUAL = "equal"
    ONE_SIDED = "only one has it"


@dataclass(frozen=True, slots=True)
class Line:
    """One figure of one row in both files.

    Attributes:
        key: names the row.
        measure: name of the figure.
        a: figure in the first file; None if it has none, for instance after a diverged run.
        b: figure in the second file; likewise.
        ratio: b over a; None where a is 0 or one of them is None.
        verdict: verdict on b against a.
    """

    key: tuple[str, ...]
    measure: str
    a: Figure | None
    b: Figure | None
    ratio: float | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class Comparison:
    """Two files of one kind.

    Attributes:
        kind: the command.
        environment: differences of the environments, as (name, in A, in B).
        lines: lines of the rows that both files have.
        only_a: keys of the rows that only the first file has.
        only_b: keys of the rows that only the second file has.
    """

    kind: str
    environment: list[tuple[str, str, str]]
    lines: list[Line]
    only_a: list[tuple[str, ...]]
    only_b: list[tuple[str, ...]]


def verdict(a: Figure, b: Figure) -> Verdict:
    """Judge b against a.

    >>> verdict(Figure(2.0, 1.9, 2.2), Figure(1.0, 0.9, 1.1)).value
    'less'
    >>> verdict(Figure(2.0, 1.0, 2.2), Figure(1.0, 0.9, 1.1)).value
    'same within spread'
    >>> verdict(Figure(2.0), Figure(2.0)).value
    'equal'
    """
    if a.value == b.value:
        return Verdict.EQUAL
    ends = [end for end in (a.low, a.high, b.low, b.high) if end is not None]
    if len(ends) == 4 and ends[0] <= ends[3] and ends[2] <= ends[1]:
        return Verdict.SAME
    return Verdict.LESS if b.value < a.value else Verdict.MORE


def compare(a: Document, b: Document, kind: Kind) -> Comparison:
    """Compare two documents of one kind.

    Raises:
        ResultFileError: the files have no row in common, or a row cannot be read.
    """
    rows_a, rows_b = rows_of(kind, a), rows_of(kind, b)
    common = [key for key in rows_a if key in rows_b]
    if not common:
        raise ResultFileError(
            f"no row in common: A has {_some(rows_a)}; B has {_some(rows_b)}. "
            "Measure both with the same options."
        )
    lines = [
        line
        for key in common
        for name in kind.figures
        if (line := _line(key, name, rows_a[key], rows_b[key])) is not None
    ]
    return Comparison(
        kind.name,
        _differences(a["environment"], b["environment"]),
        lines,
        [key for key in rows_a if key not in rows_b],
        [key for key in rows_b if key not in rows_a],
    )


def _line(key: tuple[str, ...], name: str, a: Fields, b: Fields) -> Line | None:
    mine, its = figure(a, name), figure(b, name)
    if mine is None and its is None:
        return None
    if mine is None or its is None:
        return Line(key, name, mine, its, None, Verdict.ONE_SIDED)
    ratio = its.value / mine.value if mine.value else None
    return Line(key, name, mine, its, ratio, verdict(mine, its))


def _some(rows: dict[tuple[str, ...], Fields]) -> str:
    names = [" ".join(key) for key in rows][:2]
    return f"{', '.join(names)} and others" if len(rows) > 2 else ", ".join(names) or "none"


def _differences(a: Fields, b: Fields) -> list[tuple[str, str, str]]:
    # Older files hold digests of the measured files, which say nothing to a reader.
    mine, its = (_flat({**environment, "measures": ""}) for environment in (a, b))
    return [
        (name, mine.get(name, "-"), its.get(name, "-"))
        for name in dict.fromkeys((*mine, *its))
        if mine.get(name) != its.get(name)
    ]


def _flat(fields: Fields, before: str = "") -> dict[str, str]:
    found: dict[str, str] = {}
    for name, value in fields.items():
        if isinstance(value, dict):
            found.update(_flat(value, f"{before}{name} "))
        elif isinstance(value, list):
            found[before + name] = ", ".join(
                f"{x:.2f}" if isinstance(x, float) else str(x) for x in value
            )
        else:
            found[before + name] = str(value)
    return found


def _show(found: Comparison, console: Console) -> None:
    if found.environment:
        table = Table(title="Differences of the environment", box=box.SIMPLE_HEAD)
        for heading in ("", "A", "B"):
            table.add_column(heading)
        for difference in found.environment:
            table.add_row(*map(literal, difference))
        terminal.show(table, drop=("A", "B"), console=console)
    else:
        console.print("Same environment.")
    table = Table(title=f"{found.kind}: B against A", caption=NOTE, box=box.SIMPLE_HEAD)
    table.add_column("row")
    table.add_column("figure")
    for heading in ("A", "B", "B / A"):
        table.add_column(heading, justify="right")
    table.add_column("verdict")
    for line in found.lines:
        ratio = "-" if line.ratio is None else f"{line.ratio:.3f}"
        figures = line.measure, _text(line.a), _text(line.b), ratio, line.verdict.value
        table.add_row(*map(literal, (" ".join(line.key), *figures)))
    terminal.show(table, drop=("A", "B"), console=console)
    for name, keys in (("A", found.only_a), ("B", found.only_b)):
        if keys:
            rows = ", ".join(" ".join(key) for key in keys[:5]) + (", ..." if len(keys) > 5 else "")
            console.print(literal(f"Only in {name}: {len(keys)} rows: {rows}"))


def _text(figure: Figure | None) -> str:
    if figure is None:
        return "-"
    if figure.low is None or figure.high is None:
        return f"{figure.value:.4g}"
    return f"{figure.value:.4g} [{figure.low:.4g}, {figure.high:.4g}]"


def _common_kind(a: tuple[Document, Path], b: tuple[Document, Path]) -> Kind:
    kind, other = kind_of(*a), kind_of(*b)
    if kind is not other:
        raise ResultFileError(
            f"{a[1]} is of `bench {kind.name}`, {b[1]} of `bench {other.name}`: "
            "only files of one command can be compared."
        )
    return kind


def main(
    first: Annotated[Path, typer.Argument(metavar="A.json", help="The base result file.")],
    second: Annotated[
        Path, typer.Argument(metavar="B.json", help="The result file to compare with it.")
    ],
) -> None:
    """Compare two result files of the same command: B against A."""
    a, b = load(first), load(second)
    found = compare(a, b, _common_kind((a, first), (b, second)))
    _show(found, Console())
