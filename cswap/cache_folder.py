"""The user's cache folder: kernels that were compiled and calibrations that were made.

Note [who may write the cache]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A kernel in it is machine code that this process will run, so a folder or a file counts only if
it belongs to this user or to root, and neither its group nor others may write it. It is looked
at after it was opened, and the file is opened in the folder that was looked at: nobody can
exchange either in between. Levels above are not looked at. Who may write these (``/tmp``, a
volume of a container) can put a folder of his own there, and that one is refused.
"""

from __future__ import annotations

import os
import secrets
import stat
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Final

from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Iterator

REMEDY: Final = "Remedy: set CSWAP_CACHE_DIR to a folder that you can write, and nobody else."

_NOWHERE: Final = Path(os.devnull) / "cswap"
"""Where there is no home either: nothing is in it, and nothing can be put there."""

_told: set[Path] = set()
"""Folders about which this process has said that they are not used."""


def root() -> Path:
    """``CSWAP_CACHE_DIR``, else ``cswap`` in the user's cache folder."""
    own = os.environ.get("CSWAP_CACHE_DIR")
    if own:
        return Path(own)
    try:
        return Path(os.environ.get("XDG_CACHE_HOME") or "~/.cache").expanduser() / "cswap"
    except RuntimeError:
        return _NOWHERE


def make(folder: Path) -> None:
    """Make a folder and the levels above that are missing, each for this user alone.

    Raises:
        OSError: it cannot be made, or others can write it.
    """
    missing = []
    level = folder
    while not level.exists():
        missing.append(level)
        level = level.parent
    for level in reversed(missing):
        with suppress(FileExistsError):  # another process was faster; the check below decides
            level.mkdir(0o700)
    with _opened(folder):
        pass


def read(path: Path) -> bytes | None:
    """Bytes of a file; None if there is none, or others could have written it (said once)."""
    try:
        with _opened(path.parent) as folder:
            file = os.open(path.name, os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
            with os.fdopen(file, "rb") as opened:
                _check(os.fstat(file), path)
                return opened.read()
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        tell(path, error)
        return None


def write(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all, readable and writable by this user alone.

    Raises:
        OSError: it cannot be written, or others can write its folder.
    """
    make(path.parent)
    with _opened(path.parent) as folder:
        name = f".{path.name}.{secrets.token_hex(8)}"
        file = os.open(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            with os.fdopen(file, "wb") as opened:
                opened.write(data)
            os.replace(name, path.name, src_dir_fd=folder, dst_dir_fd=folder)
        except BaseException:
            os.unlink(name, dir_fd=folder)
            raise


def tell(path: Path, error: OSError) -> None:
    """Say that a file is not used, and why: once per folder."""
    if path.parent not in _told:
        _told.add(path.parent)
        log.warning("%s is not used: %s. %s", path, error, REMEDY)


def danger(status: os.stat_result) -> str:
    """Who else can write a file or folder: ``belongs to user 1000``; empty if nobody but root.

    >>> danger(Path("/").stat())
    ''
    """
    if status.st_uid not in (os.geteuid(), 0):
        return f"belongs to user {status.st_uid}"
    if status.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return f"may be written by others (mode {stat.S_IMODE(status.st_mode):o})"
    return ""


@contextmanager
def _opened(folder: Path) -> Iterator[int]:
    try:
        descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    except NotADirectoryError:
        if folder.is_symlink():
            raise PermissionError(f"{folder} is a symbolic link") from None
        raise
    try:
        _check(os.fstat(descriptor), folder)
        yield descriptor
    finally:
        os.close(descriptor)


def _check(status: os.stat_result, path: Path) -> None:
    # See Note [who may write the cache].
    if found := danger(status):
        raise PermissionError(f"{path} {found}")
