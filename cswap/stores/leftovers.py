"""Removes the spill folders of processes that were killed or lost to a power failure.

It removes only folders of this user that were made on this machine and whose lock is free: see
Note [who owns a spill folder] in folder.py. Folders without locks have other names, and stay.
"""

from __future__ import annotations

import os
import stat
import time
from typing import TYPE_CHECKING, Final

from cswap.log import log
from cswap.stores.folder import delete_folder, is_from_here, open_folder, try_lock

if TYPE_CHECKING:
    from pathlib import Path

UNFINISHED_S: Final = 3600.0
"""A folder with a hidden name that is older than this is abandoned: making one takes
microseconds."""


def remove_leftovers(parent: Path) -> int:
    """Remove the folders of dead processes; return their number.

    Never raises: a folder that cannot be removed stays.

    Args:
        parent: directory to search.
    """
    try:
        paths = [path for path in parent.iterdir() if is_from_here(path.name)]
    except OSError:  # the directory may be writable but not readable
        return 0
    removed = sum(_remove_if_dead(path) for path in paths)
    if removed:
        log.info("%s: removed %d folders of processes that have ended.", parent, removed)
    return removed


def _remove_if_dead(path: Path) -> bool:
    try:
        folder = open_folder(path)
    except OSError:  # removed meanwhile, a symbolic link, or another user's folder
        return False
    try:
        return _is_ours(folder, path.name) and try_lock(folder) and delete_folder(path, folder)
    except OSError:
        return False
    finally:
        os.close(folder)


def _is_ours(folder: int, name: str) -> bool:
    found = os.fstat(folder)
    finished = not name.startswith(".") or time.time() - found.st_mtime > UNFINISHED_S
    shared = found.st_mode & (stat.S_IRWXG | stat.S_IRWXO)
    return finished and found.st_uid == os.geteuid() and not shared
