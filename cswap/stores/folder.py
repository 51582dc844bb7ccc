"""The folder of a store's files: private, and locked by the process that made it.

Note [who owns a spill folder]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The process that made a folder owns it. No other process deletes anything in it while the owner
lives. The owner holds a lock (``flock``) on the folder itself. The kernel releases the lock
whenever the process ends, also when it is killed. So a free lock means a dead owner, and no
process id has to be checked. `leftovers.py` removes folders of dead owners.

*A folder that is being made* has a hidden name until it is locked.

*A forked child* inherits the open folder and with it the lock. So the lock is free only after the
child has ended, too, and the child can read its parent's files. It deletes none of them: only the
process that made a folder removes it. `_process` is another object in every forked child, which
identifies the maker. `DiskStore` begins without files in a child.

*Another machine* may use the same directory over a network, and does not see these locks. So a
folder's name contains an identifier of the machine that made it, see `is_from_here`.
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
"""Attempts to empty a folder, because another thread may still write to it."""

_process = object()  # replaced in every forked child


class SpillFolder:
    """A folder of one process. It is removed with its files when collected, or at exit.

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
        # `_remove` closes the descriptor. The kernel then releases the lock.
        self._finalizer = weakref.finalize(self, _remove, self.path, folder, _process)
        # Children of multiprocessing end without atexit, and so without weakref.finalize.
        if multiprocessing.parent_process() is not None:
            multiprocessing.util.Finalize(self, self._finalizer, exitpriority=0)

    def next_path(self) -> Path:
        """A name for a new file; not thread-safe."""
        self._files += 1
        return self.path / f"{os.getpid()}-{self._files:08d}.enc"

    def remove(self) -> bool:
        """Delete the folder and its files; return whether it is gone. To be called once."""
        return bool(self._finalizer())


def is_from_here(name: str) -> bool:
    """Whether this is the name of a spill folder that was made on this machine.

    The machine is the same if the kernel has not been restarted since: containers have host names
    of their own. After a restart, it is the same if the host's name and machine id are the same.
    """
    found = _FOLDER.fullmatch(name)
    if found is None:
        return False
    host, boot = _this_machine()
    return found["host"] == host or found["boot"] == boot


def open_folder(path: Path) -> int:
    """Open a folder; return its descriptor, which the caller closes.

    Raises:
        OSError: the folder does not exist, is a symbolic link, or is not readable.
    """
    return os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)


def try_lock(folder: int) -> bool:
    """Lock an open folder; False if another process holds the lock or locks do not work here."""
    import fcntl  # not on every system; only the disk tier needs it

    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    return True


def delete_folder(path: Path, folder: int) -> bool:
    """Delete a folder's files and the folder; return whether it is gone.

    Only files of stores are deleted. A folder with other files stays.

    Args:
        path: path of the folder.
        folder: descriptor of the same folder. Files are deleted relative to it, because the path
            may change.

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
    # The folder gets its final name only after it is locked: see Note [who owns a spill folder].
    folder = open_folder(hidden)
    try:
        # Without a lock no process can tell that the owner lives. So the name is not a leftover's.
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
    # Identifiers of the host and of its current boot: eight hexadecimal digits each.
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
