"""All results in one file, which is whole after every measurement and travels between machines."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Final

from cswap.errors import ConfigError

ARCHIVE: Final = Path("gpu-results.zip")
"""In the current folder, if nothing else is said."""

SUFFIXES: Final = (".json", ".png")


def pack(folder: Path, archive: Path) -> None:
    """Write the folder's results into the archive, whole or not at all."""
    partial = archive.with_name(archive.name + ".tmp")
    with zipfile.ZipFile(partial, "w", zipfile.ZIP_DEFLATED) as file:
        for path in sorted(folder.iterdir()):
            if path.suffix in SUFFIXES:
                file.write(path, path.name)
    partial.replace(archive)


def unpack(archive: Path, folder: Path) -> list[str]:
    """Copy results that the folder lacks out of an archive, if there is one; returns their names.

    Raises:
        ConfigError: the archive is damaged, or has something else in it.
    """
    if not archive.exists():
        return []
    try:
        with zipfile.ZipFile(archive) as file:
            names = file.namelist()
            for name in names:
                if Path(name).name != name or Path(name).suffix not in SUFFIXES:
                    raise ConfigError(f"{archive}: {name!r} is no result file. Move it away.")
            lacking = [name for name in names if not (folder / name).exists()]
            for name in lacking:
                (folder / name).write_bytes(file.read(name))
    except (OSError, zipfile.BadZipFile) as error:
        raise ConfigError(f"{archive}: cannot be read ({error}). Move it away.") from error
    return lacking
