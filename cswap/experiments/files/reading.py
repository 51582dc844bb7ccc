"""Reads result files, and names the fault of one that is wrong."""

from __future__ import annotations

from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from cswap.display import short
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
            f"{path}: has no 'environment'. Name a result file that a benchmark wrote."
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
