"""The source of the tables' figures: the committed result files, or those of a folder."""

from __future__ import annotations

from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping, Sequence

ROOT: Final = Path(__file__).resolve().parents[3]
RESULTS: Final = ROOT / "bench" / "results" / "cpu"
_FILES: ContextVar[tuple[Mapping[str, Path], set[str]] | None] = ContextVar("files", default=None)


class NotReadError(Exception):
    """A table asked for a result file that `reading` does not give."""


@contextmanager
def reading(files: Mapping[str, Path]) -> Iterator[set[str]]:
    """Tables are made from other files than the committed ones; yields the names asked for.

    Args:
        files: by their names below `RESULTS`; a table that asks for another gets `NotReadError`.
    """
    asked: set[str] = set()
    token = _FILES.set((files, asked))
    try:
        yield asked
    finally:
        _FILES.reset(token)


def is_given() -> bool:
    """Whether tables are made from other files than the committed ones."""
    return _FILES.get() is not None


def load(name: str) -> dict[str, Any]:
    """The result file of this name below `RESULTS`, or the one that stands for it.

    Raises:
        NotReadError: none does.
    """
    path = RESULTS / name
    if (given := _FILES.get()) is not None:
        files, asked = given
        asked.add(name)
        if name not in files:
            raise NotReadError(name)
        path = files[name]
    return read_object(path, "file")


def as_markdown(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table; all columns but the first are of figures."""
    lines = [headings, ["---"] + ["--:"] * (len(headings) - 1), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def where(data: dict[str, Any], file: str) -> str:
    """The sentence below a table that names the command and machine of its figures."""
    e = data["environment"]
    given = _FILES.get()
    shown = f"bench/results/cpu/{file}" if given is None else given[0][file].name
    return (
        f"Measured by `{e['command']}` on {e['cpu']}, {e['n_cpus']} cores, "
        f"torch {e['versions']['torch']}; file: `{shown}`."
    )
