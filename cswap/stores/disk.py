"""The disk tier: one private file per encoding, checked on the way back."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from cswap.errors import CorruptEncodingError

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
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
    """Encodings in a directory of their own (mode 0700, files 0600), removed at exit."""

    def __init__(self, parent: Path, limit: int | None) -> None:
        """Args: parent: existing directory; limit: bytes in use at most, or None.

        Raises:
            OSError: the directory cannot be made.
        """
        self._directory = Path(tempfile.mkdtemp(prefix="cswap-", dir=parent))
        self._owner = os.getpid()
        self._limit = limit
        self._lock = threading.Lock()
        self._count = 0
        self.in_use_bytes = 0
        self.peak_bytes = 0
        atexit.register(self.close)

    def write(self, payload: torch.Tensor) -> DiskFile | None:
        """Write payload [nbytes] uint8 (CPU); None if the limit is reached.

        Raises:
            OSError: the disk is full or fails; nothing is left behind.
        """
        nbytes = payload.numel()
        with self._lock:
            if self._limit is not None and self.in_use_bytes + nbytes > self._limit:
                return None
            self.in_use_bytes += nbytes
            self.peak_bytes = max(self.peak_bytes, self.in_use_bytes)
            self._count += 1
            path = self._directory / f"{self._count:08d}.enc"
        data = memoryview(payload.numpy().data)
        try:
            handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(handle, "wb", buffering=0) as file:
                _write_all(file.fileno(), data)
        except BaseException:
            self._drop(path, nbytes)
            raise
        return DiskFile(path, nbytes, zlib.crc32(data))

    def read(self, file: DiskFile, out: torch.Tensor) -> None:
        """Read a file into out [nbytes] uint8 (CPU).

        Raises:
            CorruptEncodingError: the file is gone or not what was written.
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
            raise CorruptEncodingError(f"{file.path}: is not what was written there.")

    def release(self, file: DiskFile) -> None:
        """Delete a file."""
        self._drop(file.path, file.nbytes)

    def close(self) -> None:
        """Delete everything."""
        if os.getpid() == self._owner:  # a forked child must not delete its parent's files
            shutil.rmtree(self._directory, ignore_errors=True)
            atexit.unregister(self.close)

    def _drop(self, path: Path, nbytes: int) -> None:
        path.unlink(missing_ok=True)
        with self._lock:
            self.in_use_bytes -= nbytes


def _write_all(descriptor: int, data: memoryview) -> None:
    done = 0
    while done < len(data):
        done += os.write(descriptor, data[done:])
