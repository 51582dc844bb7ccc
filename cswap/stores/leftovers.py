"""Removes spill folders of processes that ended without doing so: killed, or lost with the power.

Only folders of this user, made on this machine, whose lock nobody holds: see
Note [who owns a spill folder] in folder.py. Folders without a lock have other names, and stay.
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
"""After so long a folder with a hidden name is not in the making: that takes microseconds."""


def remove_leftovers(parent: Path) -> int:
    """Remove the folders of dead processes; how many.

    Never raises: a folder that cannot be removed stays.

    Args:
        parent: directory in which they are looked for.
    """
    try:
        paths = [path for path in parent.iterdir() if is_from_here(path.name)]
    except OSError:  # it may be written to, but not read
        return 0
    removed = sum(_remove_if_dead(path) for path in paths)
    if removed:
        log.info("%s: removed %d folders of processes that have ended.", parent, removed)
    return removed


def _remove_if_dead(path: Path) -> bool:
    try:
        folder = open_folder(path)
    except OSError:  # gone by now, a symbolic link, or another user's
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
