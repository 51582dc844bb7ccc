"""`Sources`: tensors' own memory that a side stream has yet to read, in the order of the device.

Note [a source waits for its size]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
As many bytes of an encoding are copied as the last one took, and a little more. The host learns its
size later. Until then it keeps the tensor's own memory: an encoding that has grown is made again.
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING

from cswap.stats.counters import NO_TENSOR

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.devices.side_streams import SideStreams
    from cswap.engine.link.link_way import Region
    from cswap.stats.counters import Counters


class Sources:
    """The sources of one link, oldest first. Used under its lock.

    Attributes:
        nbytes: of them.
        most_bytes: that they may have: beyond that, the user's stream waits for the oldest.
        came_bytes: that have come back since the newest of them was saved.
        asked_bytes: of those that backward has asked for already: a copy still reads them.
        settle: looks at the sizes of a region's encodings, and waits for them.
    """

    settle: Callable[[Region], None]

    def __init__(self, streams: SideStreams, counters: Counters) -> None:
        """Args: streams: of the device; counters: the engine's."""
        self._streams, self._counters = streams, counters
        self._regions: deque[Region] = deque()
        self._held: list[Region] = []  # that have been read, and are wanted, or stay
        self.nbytes = self.most_bytes = self.came_bytes = self.asked_bytes = 0

    def add(self, region: Region) -> None:
        """A tensor's own memory is about to be read."""
        self._regions.append(region)
        self.nbytes += region.way.nbytes
        self.came_bytes = 0
        self.let_go(self.most_bytes)

    def let_go(self, most_bytes: int) -> None:
        """Let go of those that have been read, and of the oldest until so many bytes are left.

        The user's stream waits for these to be read; the host does not, but for sizes. Their memory
        is used again by computation that comes after that wait.
        """
        regions, read = self._regions, self._held
        while regions:
            oldest = regions[0]
            is_read = oldest.read.query()
            if not is_read and self.nbytes <= most_bytes:
                break
            if oldest.n_unsized and oldest.owner() is not None:
                self.settle(oldest)  # see Note [a source waits for its size]
                if not regions or regions[0] is not oldest:  # to make room, others were let go
                    continue
                if oldest.n_unsized:  # by the caller: it is about to be encoded again
                    break
                is_read = oldest.read.query()
            if not is_read:
                self._streams.stall(oldest.stream, oldest.read)
            regions.popleft()
            self.nbytes -= oldest.way.nbytes
            if oldest.asked:
                self.asked_bytes -= oldest.way.nbytes
            read.append(oldest)
        if not read:
            return
        held: list[Region] = []
        for region in read:
            if region.source is None:
                continue
            if (region.wanted or region.stays) and region.owner() is not None:
                held.append(region)
                continue
            region.source, nbytes = None, region.way.nbytes  # if it was modified, unpack raises
            region.held_bytes -= nbytes
            self._counters.moves.append((-nbytes, 0, *NO_TENSOR))
        self._held = held

    def asks(self, region: Region) -> None:
        """Backward asks for a tensor for the first time."""
        if region in self._regions:
            self.asked_bytes += region.way.nbytes

    def begin_backward(self) -> None:
        """Backward has asked for none yet."""
        self.asked_bytes = 0

    def drop(self, region: Region) -> None:
        """Let go of one, whether it has been read or not."""
        region.stream.wait_event(region.read)
        if region in self._regions:
            self._regions.remove(region)
            self.nbytes -= region.way.nbytes
            if region.asked:
                self.asked_bytes -= region.way.nbytes
        elif region in self._held:
            self._held.remove(region)  # it may hold another tensor soon
        region.source = None

    def recount(self, alive: list[Region]) -> None:
        """After an interrupt: add up again. Args: alive: all regions that may have one."""
        self._held.clear()
        missed = [r for r in alive if r not in self._regions]
        self._regions.extend(missed)
        self._regions = deque(r for r in self._regions if r.source is not None)
        self.nbytes = sum(region.way.nbytes for region in self._regions)
        self.asked_bytes = sum(r.way.nbytes for r in self._regions if r.asked)
