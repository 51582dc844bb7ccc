"""`Spill`: encodings for which the host store has no room go on to the disk, and come back."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Final

from cswap.errors import InternalError
from cswap.stats.counters import NO_TENSOR

if TYPE_CHECKING:
    from concurrent.futures import Future

    import torch

    from cswap.engine.link.link_way import Part, Region
    from cswap.engine.transfer.resources import Resources
    from cswap.stores.disk import DiskFile

MOST_ARRIVING_BYTES: Final = 256 << 20
"""Of host memory into which copies are under way; past it, the host waits for the oldest."""


class Spill:
    """Of one link. Used under its lock.

    A part's bytes are in host memory of their own until they have been written.
    """

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._device, self._counters = resources.over_link, resources.counters
        self._disk, self._files = resources.disk, resources.files
        self._arriving: deque[Part] = deque()
        self._writing: list[Part] = []
        self._is_full = False

    def memory(self, nbytes: int) -> torch.Tensor | None:
        """[>= nbytes] uint8 of the host, for one part; None: no disk with room, or no memory."""
        if self._files is None or self._is_full:
            return None
        while sum(part.nbytes for part in self._arriving) > MOST_ARRIVING_BYTES:
            self._arriving[0].left.synchronize()
            self.look()
        try:
            return self._device.host_memory(max(nbytes, 1))
        except MemoryError as error:
            self._counters.fall_back("disk", error)
            return None

    def add(self, part: Part) -> None:
        """A part's copy to its host memory has been issued, and its size is known."""
        self._arriving.append(part)

    def look(self) -> None:
        """Write the parts that have arrived by now; let go of those that have been written."""
        files = self._files
        if files is None:
            return
        while self._arriving and self._arriving[0].left.query():
            part = self._arriving.popleft()
            if part.host is not None:  # else nobody wants it
                part.writing = files.write(part.host[: part.nbytes])
                self._writing.append(part)
        if self._writing:
            self._writing = [part for part in self._writing if not self._is_written(part)]

    def _is_written(self, part: Part) -> bool:
        writing = part.writing
        if writing is None:  # nobody wants it
            return True
        if not writing.done():
            return False
        error = writing.exception()
        part.writing = None
        if error is None:
            part.file, part.host = writing.result(), None
        else:  # it stays where it is, and later ones stay on the device
            self._is_full = True
            self._counters.fall_back("disk", error, "tensors stay")
            if part.host is not None:
                part.region.host_bytes += part.host.numel()
                self._counters.moves.append((0, part.host.numel(), *NO_TENSOR))
        return True

    def settle(self) -> None:
        """Wait until all parts have been written."""
        for part in self._arriving:
            part.left.synchronize()
        self.look()
        for part in self._writing:
            if part.writing is not None:
                part.writing.exception()  # waits
        self.look()

    def is_read(self, region: Region) -> bool:
        """Begin to read a region's files; whether all of them are in memory by now."""
        files = [part.file for part in region.parts if part.file is not None]
        return not files or (self._files is not None and self._files.read_ahead(files))

    def fetch(self, part: Part) -> torch.Tensor:
        """[nbytes] uint8 of the host with a part's bytes; waits for the disk.

        Raises:
            CorruptEncodingError: the file is gone or damaged.
            MemoryError: no host memory to read into.
        """
        if part.host is not None:
            return part.host
        if part.file is None or self._files is None:
            raise InternalError("a part of a tensor is neither in host memory nor in a file")
        return self._files.take(part.file)

    def drop(self, part: Part) -> None:
        """Nobody wants a part any more; work of the device with its host memory may be under way.

        Args:
            part: its event ``left`` comes after that work.
        """
        host, file, writing = part.host, part.file, part.writing
        part.host = part.file = part.writing = None
        if host is not None:
            self._device.hold(host, part.left)
        if file is not None:
            self._release(file)
        if writing is not None:
            writing.add_done_callback(self._release_written)

    def _release_written(self, writing: Future[DiskFile]) -> None:
        file = None if writing.exception() is not None else writing.result()
        if file is not None:
            self._release(file)

    def _release(self, file: DiskFile) -> None:
        assert self._disk is not None and self._files is not None  # noqa: PT018 - or no file
        self._files.forget(file)
        self._disk.release(file)
        self._is_full = False
