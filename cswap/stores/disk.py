"""The disk tier: encodings in one file without a name, checked on the way back.

Note [a file without a name]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The file is deleted as soon as it is open. So nobody else can open it, and the system frees its
bytes when the last process that has it open closes it or ends, however it ends: nothing is left to
be removed, and no run meets another's files.

A forked child has its parent's file open, and may read what its parent has not released. It writes
to a file of its own.
"""

from __future__ import annotations

import errno
import os
import tempfile
import threading
import weakref
import zlib
from bisect import insort
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import TYPE_CHECKING

from cswap.errors import CorruptEncodingError

if TYPE_CHECKING:
    from pathlib import Path

    import torch


class SpillFile:
    """A file without a name, open until nobody refers to this object.

    Attributes:
        descriptor: of the file.
    """

    def __init__(self, parent: Path) -> None:
        """Args: parent: existing directory, on whose disk the file is.

        Raises:
            OSError: it cannot be made.
        """
        with tempfile.TemporaryFile(dir=parent) as file:
            self.descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self.descriptor).atexit = False


@dataclass(frozen=True, slots=True, eq=False)
class DiskFile:
    """One encoding on disk.

    Attributes:
        spill: the file that it is in.
        offset: of its first byte there.
        nbytes: its size.
        checksum: CRC-32 of its bytes.
    """

    spill: SpillFile
    offset: int
    nbytes: int
    checksum: int

    @property
    def end(self) -> int:
        """Offset of the byte behind its last one."""
        return self.offset + self.nbytes


class DiskStore:
    """Encodings in a file of their own. Thread-safe; may be forked.

    Attributes:
        in_use_bytes: bytes on disk that this process has written and not released.
        peak_bytes: maximum of ``in_use_bytes``.
    """

    _spill: SpillFile | None

    def __init__(self, parent: Path) -> None:
        """Make the file. Args: parent: existing directory.

        Raises:
            OSError: the file cannot be made.
        """
        self._parent = parent.resolve()
        self._closed = False
        self.begin_empty()
        _stores.add(self)
        self._spill = SpillFile(self._parent)

    def begin_empty(self) -> None:
        """Forget every encoding, and make a new lock. For a forked child: they are its parent's."""
        self._lock = threading.Lock()
        self._spill = None
        self._live: list[DiskFile] = []  # by offset
        self.in_use_bytes = 0
        self.peak_bytes = 0

    def write(self, payload: torch.Tensor) -> DiskFile:
        """Write payload [nbytes] uint8 (CPU).

        Raises:
            OSError: the disk is full or fails. Nothing is kept then.
        """
        data = memoryview(payload.numpy().data)
        file = self._reserve(payload.numel(), zlib.crc32(data))
        try:
            _write(file, data)
        except BaseException:
            self.release(file)
            raise
        return file

    def read(self, file: DiskFile, out: torch.Tensor) -> None:
        """Read an encoding into out [nbytes] uint8 (CPU).

        Raises:
            CorruptEncodingError: it is gone, or its bytes have changed since the write.
        """
        target, done = memoryview(out.numpy().data)[: file.nbytes], 0
        descriptor = file.spill.descriptor
        try:
            while done < file.nbytes and (
                n := os.preadv(descriptor, [target[done:]], file.offset + done)
            ):
                done += n
        except OSError as error:
            raise CorruptEncodingError(
                f"{self._parent}: an encoding cannot be read back: {error}"
            ) from error
        if zlib.crc32(target) != file.checksum:
            raise CorruptEncodingError(
                f"{self._parent}: an encoding's content was changed after the write."
            )

    def release(self, file: DiskFile) -> None:
        """Let go of an encoding; a second time does nothing, nor does it for that of a parent."""
        with self._lock:
            if file not in self._live:
                return
            self._live.remove(file)
            self.in_use_bytes -= file.nbytes
            end = max((other.end for other in self._live), default=0)
            with suppress(OSError):  # it takes more of the disk then, until the file goes
                os.ftruncate(file.spill.descriptor, end)
            self._drop_unused()

    def close(self) -> None:
        """Let go of the file as soon as nothing in it can be read any more.

        After close, encodings can still be read, written and released.
        """
        with self._lock:
            self._closed = True
            self._drop_unused()

    def _drop_unused(self) -> None:
        # Under the lock.
        if self._closed and not self._live:
            self._spill = None

    def _reserve(self, nbytes: int, checksum: int) -> DiskFile:
        # The lock covers the places and the making of the file. Bytes are written without it, so
        # that a slow disk does not block other threads.
        with self._lock:
            offset = self._first_gap(nbytes)
            if self._spill is None:
                self._spill = SpillFile(self._parent)
            file = DiskFile(self._spill, offset, nbytes, checksum)
            insort(self._live, file, key=attrgetter("offset"))
            self.in_use_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
        return file

    def _first_gap(self, nbytes: int) -> int:
        # Under the lock. Backward releases in the reverse order, so there are few gaps.
        end = 0
        for file in self._live:
            if file.offset - end >= nbytes:
                break
            end = max(end, file.end)
        return end


_stores: weakref.WeakSet[DiskStore] = weakref.WeakSet()


def _begin_in_child() -> None:
    for store in list(_stores):
        store.begin_empty()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)


def _write(file: DiskFile, data: memoryview) -> None:
    done = 0
    while done < len(data):
        n = os.pwrite(file.spill.descriptor, data[done:], file.offset + done)
        if not n:
            raise OSError(errno.EIO, "nothing was written")
        done += n
