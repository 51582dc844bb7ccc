"""Options that several commands share, and their checks."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final

import typer

from cswap.display import short
from cswap.errors import ConfigError, UnsupportedError
from cswap.install_hint import to_install

if TYPE_CHECKING:
    from collections.abc import Sequence

N_THREADS: Final = 2
"""Threads of torch and of codecs: fixed, because their number changes the order of sums, and so
results between machines."""

RESULTS: Final = Path("cswap-results")
"""Folder of `cswap bench`'s results, in the current folder."""

Again = Annotated[bool, typer.Option("--again", help="Do not go on with an unfinished run.")]
"""Option of commands that keep finished parts in a file (`cswap.experiments.files.resumable`)."""


JobsOption = Annotated[int, typer.Option("--jobs", help="Processes that train.", min=1)]


def needs(command: str, *modules: str, extra: str = "bench") -> None:
    """Check for packages before anything runs.

    Args:
        command: for the message.
        modules: that it imports.
        extra: the group of optional packages that they belong to.

    Raises:
        UnsupportedError: one of them is not installed.
    """
    if missing := [name for name in modules if find_spec(name) is None]:
        raise UnsupportedError(f"{command} needs {', '.join(missing)}: {to_install(extra)}")


def names(option: str, text: str, known: Sequence[str]) -> list[str]:
    """The comma-separated names of an option.

    Raises:
        ConfigError: one of them is unknown, or there is none.

    >>> names("--models", "cnn, gpt", ("cnn", "vit", "gpt"))
    ['cnn', 'gpt']
    """
    found = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in found if name not in known]
    if unknown or not found:
        what = f"unknown {', '.join(unknown)}" if unknown else "names nothing"
        raise ConfigError(f"{option} {text!r}: {what}; known are {', '.join(known)}.")
    return found


def writable_folder(folder: Path) -> Path:
    """The folder, made if there is none: known before anything runs that is to be kept there.

    Raises:
        ConfigError: nothing can be written there.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / ".write-test"
        probe.touch()
        probe.unlink()
    except (OSError, ValueError) as error:
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(
            f"--out {short(str(folder))}: cannot write there ({why}). Name another folder."
        ) from error
    return folder


def writable_file(file: Path) -> Path:
    """The path of a file whose folder is made if there is none: known before anything runs.

    Raises:
        ConfigError: the file cannot be written.
    """
    writable_folder(file.parent)
    try:
        wrong = file.is_dir() or not file.name
    except (OSError, ValueError):
        wrong = True
    if wrong:
        raise ConfigError(f"--out {short(str(file))}: is no file's name. Name one, such as x.json.")
    return file
