"""Kinds of result files. A document names its kind in the field ``kind``."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final

from cswap.display import short, shown
from cswap.errors import ConfigError
from cswap.schema.reading import read_object

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

Document = dict[str, Any]


class ResultFileError(ConfigError):
    """A result file cannot be read, or is not one that the benchmarks write."""


def load(path: Path) -> Document:
    """Read a result file.

    Raises:
        ResultFileError: the file cannot be read, or is not a JSON object with an environment.
    """
    found = read_object(path, "file", ResultFileError)
    if not isinstance(found.get("environment"), dict):
        raise ResultFileError(
            f"{path}: has no 'environment'. Name a result file that `python -m bench` wrote."
        )
    return found


@contextmanager
def understood(path: Path) -> Iterator[None]:
    """A context for making tables and pictures of a file; missing fields become its error.

    Raises:
        ResultFileError: a field is missing, or has another type than a benchmark writes.
    """
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError, ArithmeticError) as error:
        if isinstance(error, ConfigError):
            raise
        raise ResultFileError(
            f"{path}: lacks something, or has it in another form ({short(str(error))}). Name a "
            "file that this version of the benchmarks wrote."
        ) from error


def kind_of(document: Document, path: Path) -> str:
    """The kind that a document names: a key of `FILES`.

    Raises:
        ResultFileError: the kind is unknown.
    """
    named = document.get("kind")
    if isinstance(named, str) and named in FILES:
        return named
    its = shown(named) if named else "it names none"
    raise ResultFileError(f"{path}: of no known kind ({its}); known: {', '.join(FILES)}.")


FILES: Final = {
    "codecs": "codecs.json",
    "swap": "swap.json",
    "workloads": "workloads.json",
    "inlined": "inlined.json",
    "fit": "fit.json",
    "accuracy": "accuracy/results.json",
    "accuracy pilot": "accuracy/pilot.json",
    "accuracy schedule": "accuracy/schedule.json",
    "demo": "demo.json",
    "advisor": "advisor.json",
    "sparsity": "sparsity.json",
    "papers": "papers.json",
    "gpu codecs": "codecs.json",
    "gpu link": "link.json",
    "gpu swap": "swap.json",
    "gpu training": "training.json",
    "gpu static": "kernels.json",
    "gpu build": "kernels-build.json",
    "twin": "twin.json",
    "twin policies": "policies.json",
    "twin validation": "validation.json",
}
"""Name of the file among the committed results, by kind: the command, or a part of it."""
