"""The source of the tables' figures: the committed result files."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

from cswap.experiments.files.environment import ROOT
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

RESULTS: Final = ROOT / "bench" / "results" / "cpu"


def load(name: str) -> dict[str, Any]:
    """The result file of this name below `RESULTS`."""
    return read_object(RESULTS / name, "file")


def as_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first are of figures."""
    lines = [headings, ["---"] + ["--:"] * (len(headings) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(data: dict[str, Any], file: str) -> str:
    """The sentence below a table that names the command and machine of its figures."""
    e = data["environment"]
    return (
        f"Measured by `{e['command']}` on {e['cpu']}, {e['n_cpus']} cores, "
        f"torch {e['versions']['torch']}; file: `bench/results/cpu/{file}`."
    )
