"""The folder that a store's files lie in: private, locked by the process that made it.

Note [who owns a spill folder]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The process that made a folder owns it, and nobody else deletes anything in it while that process
lives. The owner holds a lock (``flock``) on the folder itself. The kernel lets go of it when the
process ends, however it ends: a free lock means a dead owner, and no process id is asked for.
`leftovers.py` removes folders of dead owners.

*A folder that is being made* has a hidden name until it is locked.

*A forked child* inherits the open folder. The lock is held until the child has ended, too, so that
it can read its parent's files. It deletes none of them: a folder is removed by the process that
made it, which `_process` tells from its copies, and `DiskStore` begins anew in a child.

*Another machine* may use the same directory over a network, and does not see these locks. So a
folder's name says on which machine it was made, see `is_from_here`.
"""

from __future__ import annotations

import multiprocessing.util
import os
import re
import tempfile
import weakref
import zlib
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Final

_FOLDER: Final = re.compile(r"\.?cswap-\d+-(?P<host>[0-9a-f]{8})-(?P<boot>[0-9a-f]{8})-\w{8}")
_FILE: Final = re.compile(r"\d+-\d+\.enc")
_PASSES: Final = 3
"""How often a folder is emptied while another thread may still write to it."""

_process = object()  # another one in every forked child


class SpillFolder:
    """A folder of one process, removed with its files when nobody refers to it, or at exit.

    Attributes:
        path: the folder, mode 0700.
    """

    def __init__(self, parent: Path) -> None:
        """Args: parent: existing directory.

        Raises:
            OSError: the folder cannot be made.
        """
        prefix = "-".join([".cswap", str(os.getpid()), *_this_machine(), ""])
        hidden = Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        try:
            self.path, folder = _lock_and_rename(hidden)
        except BaseException:
            with suppress(OSError):
                hidden.rmdir()
            raise
        self._files = 0
        # The descriptor is closed there, and with it goes the lock.
        self._finalizer = weakref.finalize(self, _remove, self.path, folder, _process)
        # Children of multiprocessing end without atexit, and so without weakref.finalize.
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(self, self._finalizer, exitpriority=0)

    def next_path(self) -> Path:
        """A name for a new file; not thread-safe."""
        self._files += 1
        return self.path / f"{os.getpid()}-{self._files:08d}.enc"

    def remove(self) -> bool:
        """Delete the folder and its files; whether it is gone. To be called once."""
        return bool(self._finalizer())


def is_from_here(name: str) -> bool:
    """Whether this is the name of a spill folder that was made on this machine.

    The machine is the same if the kernel has not been started anew since (containers have host
    names of their own), or if it has and the host's name and machine id are the same.
    """
    found = _FOLDER.fullmatch(name)
    if found is None:
        return False
    host, boot = _this_machine()
    return found["host"] == host or found["boot"] == boot


def open_folder(path: Path) -> int:
    """A folder's descriptor, to be closed by the caller.

    Raises:
        OSError: there is none, it is a symbolic link, or it is not readable.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def try_lock(folder: int) -> bool:
    """Lock an open folder; False if somebody else holds the lock, or if there are no locks here."""
    import fcntl  # not on every system; without a disk tier nothing needs it

    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def delete_folder(path: Path, folder: int) -> bool:
    """Delete a folder's files and the folder; whether it is gone.

    Nothing else is deleted: a folder with files in it that no store has written stays.

    Args:
        path: of the folder.
        folder: the same, opened: names in it are not looked up by a path that may change.

    Raises:
        OSError: the folder cannot be listed.
    """
    for _ in range(_PASSES):
        for name in os.listdir(folder):
            if _FILE.fullmatch(name):
                with suppress(OSError):  # then the folder cannot be deleted, either
                    os.unlink(name, dir_fd=folder)
        with suppress(OSError):
            path.rmdir()
        if not path.exists():
            return True
    return False


def _lock_and_rename(hidden: Path) -> tuple[Path, int]:
    # Named only once it is locked: see Note [who owns a spill folder].
    folder = open_folder(hidden)
    try:
        # Without a lock nobody could tell that its owner lives: no name of a leftover, then.
        name = hidden.name[1:] if try_lock(folder) else f"cswap-unlocked-{hidden.name[-8:]}"
        return hidden.rename(hidden.with_name(name)), folder
    except BaseException:
        os.close(folder)
        raise


def _remove(path: Path, folder: int, process: object) -> bool:
    if process is not _process:  # a forked child's copy: the folder is its parent's
        return False
    try:
        return delete_folder(path, folder)
    except OSError:  # the next store tries again, see leftovers.py
        return False
    finally:
        os.close(folder)


@cache
def _this_machine() -> tuple[str, str]:
    # Of the host, and of the time since its kernel was started: eight hexadecimal digits each.
    host = os.uname().nodename + _text_of("/etc/machine-id")
    return _digits(host), _digits(_text_of("/proc/sys/kernel/random/boot_id") or host)


def _text_of(path: str) -> str:
    try:
        return Path(path).read_text("utf-8")
    except OSError:
        return ""


def _digits(text: str) -> str:
    return f"{zlib.crc32(text.encode()):08x}"


def _begin_in_child() -> None:
    global _process
    _process = object()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
