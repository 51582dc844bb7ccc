"""A thread of its own for files: written and read beside the computation."""

from __future__ import annotations

import os
import threading
import weakref
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    import torch

    from cswap.stores.disk import DiskFile, DiskStore

MOST_WAITING_BYTES: Final = 256 << 20
"""Of encodings in host memory that wait to be written; past it, whoever has another one waits."""


class DiskQueue:
    """Writes and reads of one disk store, one after the other. Thread-safe; may be forked."""

    def __init__(self, disk: DiskStore, allocate: Callable[[int], torch.Tensor]) -> None:
        """Args: disk: the store; allocate: [n] uint8 of host memory to read n bytes into."""
        self._disk = disk
        self._allocate = allocate
        self._begin()
        _queues.add(self)

    def _begin(self) -> None:
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="cswap-disk")
        self._room = threading.Condition()
        self._waiting_bytes = 0
        self._read: dict[DiskFile, Future[torch.Tensor]] = {}

    def write(self, payload: torch.Tensor) -> Future[DiskFile]:
        """Write payload [nbytes] uint8.

        Waits while too many encodings wait. The future raises `OSError` if the disk fails.
        """
        nbytes = payload.numel()
        with self._room:
            while self._waiting_bytes > MOST_WAITING_BYTES:
                self._room.wait(1.0)
            self._waiting_bytes += nbytes
        future = self._thread.submit(self._disk.write, payload)
        future.add_done_callback(lambda _: self._done(nbytes))
        return future

    def _done(self, nbytes: int) -> None:
        with self._room:
            self._waiting_bytes -= nbytes
            self._room.notify_all()

    def read_ahead(self, files: Iterable[DiskFile]) -> bool:
        """Begin to read files that nobody reads yet; whether all of them have been read."""
        futures = [self._begin_read(file) for file in files]
        return all(future.done() for future in futures)

    def _begin_read(self, file: DiskFile) -> Future[torch.Tensor]:
        with self._room:
            found = self._read.get(file)
            if found is None:
                found = self._read[file] = self._thread.submit(self._load, file)
            return found

    def _load(self, file: DiskFile) -> torch.Tensor:
        target = self._allocate(max(file.nbytes, 1))[: file.nbytes]
        self._disk.read(file, target)
        return target

    def take(self, file: DiskFile) -> torch.Tensor:
        """[nbytes] uint8 of host memory with the file's bytes; waits for them.

        Raises:
            CorruptEncodingError: the file is gone or damaged.
            MemoryError: no host memory to read into.
        """
        future = self._begin_read(file)
        try:
            return future.result()
        finally:
            self.forget(file)

    def forget(self, file: DiskFile) -> None:
        """Let go of bytes that were read ahead."""
        with self._room:
            self._read.pop(file, None)

    def forked(self) -> None:
        """In a forked child: its thread is gone, with the job that it was doing."""
        self._begin()


_queues: weakref.WeakSet[DiskQueue] = weakref.WeakSet()


def _begin_in_child() -> None:
    for one in list(_queues):
        one.forked()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_begin_in_child)
