"""The disk tier: one private file per encoding, checked on the way back.

Note [when a spill folder goes]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The constructor of a store makes its folder. Only the users of a store keep it alive.

close()      the folder is removed when no readable `DiskFile` is left: at once, or with the last
             `release`. A later write makes a new folder, which is removed in the same way.
collected    the folder is removed with the store. Each reader of its files refers to the store, so
             no reader is left.
exit         the folder is removed.
killed       the folder stays. The next store in the same parent directory removes it.
forked       the child begins without a folder and without files. It may read its parent's files
             as long as the parent keeps them, and deletes none of them.
"""

from __future__ import annotations

import errno
import os
import threading
import weakref
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from cswap.errors import CorruptEncodingError
from cswap.stores.folder import SpillFolder
from cswap.stores.leftovers import remove_leftovers

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    import torch


@dataclass(frozen=True)  # without slots, because stores hold weak references to it
class DiskFile:
    """One encoding on disk.

    Attributes:
        path: the file.
        nbytes: its size.
        checksum: CRC-32 of its bytes.
    """

    path: Path
    nbytes: int
    checksum: int


class DiskStore:
    """Encodings in a folder of their own (mode 0700, files 0600). Thread-safe; may be forked.

    Attributes:
        in_use_bytes: bytes of the files on disk that this process has written.
        peak_bytes: maximum of ``in_use_bytes``.
    """

    _folder: SpillFolder | None

    def __init__(
        self,
        parent: Path,
        limit: int | None,
        on_failure: Callable[[str, object], None] | None = None,
    ) -> None:
        """Make the folder, and remove the folders of processes that have ended.

        Args:
            parent: existing directory.
            limit: largest number of bytes in use; None: no limit.
            on_failure: called with "disk:delete" and the reason when a file or a folder cannot be
                deleted.

        Raises:
            OSError: the folder cannot be made.
        """
        self._parent = parent.resolve()
        self._limit = limit
        self._on_failure = on_failure
        self._closed = False
        self.begin_empty()
        _stores.add(self)
        remove_leftovers(self._parent)
        self._folder = SpillFolder(self._parent)

    def begin_empty(self) -> None:
        """Forget every file and make a new lock. For a forked child: the files are its parent's."""
        self._lock = threading.Lock()
        self._folder = None
        self._readable: weakref.WeakSet[DiskFile] = weakref.WeakSet()
        self._undeleted: list[DiskFile] = []
        self.in_use_bytes = 0
        self.peak_bytes = 0

    def write(self, payload: torch.Tensor) -> DiskFile | None:
        """Write payload [nbytes] uint8 (CPU); None if the limit is reached.

        Raises:
            OSError: the disk is full or fails. The incomplete file is removed.
        """
        if self._is_full(payload.numel()):  # checked before the checksum reads all bytes
            return None
        data = memoryview(payload.numpy().data)
        file = self._reserve(payload.numel(), zlib.crc32(data))
        if file is None:
            return None
        try:
            descriptor = os.open(file.path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
        except BaseException:  # no file was made: a file of that name belongs to another process
            self._forget(file)
            raise
        try:
            _write_and_close(descriptor, data)
        except BaseException:
            self.release(file)
            raise
        return file

    def read(self, file: DiskFile, out: torch.Tensor) -> None:
        """Read a file into out [nbytes] uint8 (CPU).

        Raises:
            CorruptEncodingError: the file is gone, or its bytes have changed since the write.
        """
        target = memoryview(out.numpy().data)
        try:
            with file.path.open("rb", buffering=0) as source:
                done = 0
                while done < file.nbytes and (n := source.readinto(target[done : file.nbytes])):
                    done += n
        except OSError as error:
            raise CorruptEncodingError(f"{file.path}: cannot be read back: {error}") from error
        if done != file.nbytes or zlib.crc32(target[: file.nbytes]) != file.checksum:
            raise CorruptEncodingError(f"{file.path}: its content was changed after the write.")

    def release(self, file: DiskFile) -> None:
        """Delete a file. In a forked child, the parent's files are not deleted.

        A file that cannot be deleted still counts in `in_use_bytes`. The next successful deletion
        tries it again.
        """
        if file not in self._readable:  # the file is the parent's, or was released before
            return
        if self._delete(file):
            with self._lock:
                again = self._undeleted.pop() if self._undeleted else None
            if again is not None:
                self._delete(again)
        self._remove_unused_folder()

    def close(self) -> None:
        """Remove the folder as soon as no file in it can be read any more.

        After close, files can still be read, written and released. See Note [when a spill folder
        goes].
        """
        self._closed = True
        self._remove_unused_folder()

    def _is_full(self, nbytes: int) -> bool:
        return self._limit is not None and self.in_use_bytes + nbytes > self._limit

    def _reserve(self, nbytes: int, checksum: int) -> DiskFile | None:
        # The lock covers the accounts and the making of the folder. Files are written and deleted
        # without it, so that a slow disk does not block other threads.
        with self._lock:
            if self._is_full(nbytes):
                return None
            if self._folder is None:
                self._folder = SpillFolder(self._parent)
            file = DiskFile(self._folder.next_path(), nbytes, checksum)
            self._readable.add(file)
            self.in_use_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return file

    def _forget(self, file: DiskFile) -> None:
        with self._lock:
            self._readable.discard(file)
            self.in_use_bytes -= file.nbytes

    def _delete(self, file: DiskFile) -> bool:
        try:
            file.path.unlink(missing_ok=True)
        except OSError as error:
            with self._lock:
                self._readable.discard(file)
                self._undeleted.append(file)
            self._report(error)
            return False
        self._forget(file)
        return True

    def _remove_unused_folder(self) -> None:
        if not self._closed:
            return
        with self._lock:
            if self._readable:
                return
            folder, self._folder = self._folder, None
            nbytes = self.in_use_bytes  # bytes of files that could not be deleted, or were lost
            self._undeleted.clear()
        if folder is None:
            return
        if folder.remove():
            with self._lock:
                self.in_use_bytes -= nbytes
        else:
            self._report(f"{folder.path}: cannot be removed")

    def _report(self, why: object) -> None:
        if self._on_failure is not None:
            self._on_failure("disk:delete", why)


_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _begin_in_child() -> None:
    for store in list(_stores):
        store.begin_empty()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


def _write_and_close(descriptor: int, data: memoryview) -> None:
    try:
        done = 0
        while done < len(data):
            n = os.write(descriptor, data[done:])
            if not n:
                raise OSError(errno.EIO, "nothing was written")
            done += n
    finally:
        os.close(descriptor)
