"""Output files of commands: a file that cannot be written is refused before anything runs."""

from __future__ import annotations

from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from cswap.display import shown, visible
from cswap.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Iterator


def check_writable(option: str, path: str) -> Path:
    """Check that a file can be written; return its path. An existing file is not changed.

    Args:
        option: the option as the user writes it, for messages.
        path: path of a file in an existing folder.

    Raises:
        ConfigError: the file cannot be written.
    """
    file = Path(path)
    with writing(option, path):
        existed = file.exists()
        if not existed or file.is_file() or file.is_dir():  # opening a pipe would wait for a reader
            with file.open("ab"):
                pass
        if not existed:
            file.unlink()
    return file


@contextmanager
def writing(option: str, path: str) -> Iterator[None]:
    """Turn an error of writing the file into a ConfigError that names the option.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        yield
    except (OSError, ValueError) as error:
        if isinstance(error, ConfigError):
            raise
        why = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise ConfigError(
            f"{option} {shown(path)}: cannot be written ({visible(why)}). Name another file."
        ) from error
