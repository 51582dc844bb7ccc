"""`Ring`: scratch memory that encodings pass through, used in turns, in the order of the device."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

if TYPE_CHECKING:
    import torch

    from cswap.devices.side_streams import SideStreams

ALIGN: Final = 256
"""Bytes to which places in the ring are aligned."""


class _Use(NamedTuple):
    """A place in the ring.

    Attributes:
        start, stop: bytes.
        last: event of its last use.
    """

    start: int
    stop: int
    last: Any


class Ring:
    """A block of the codec stream's memory, handed out from front to back, and again.

    One stream writes it. Before it does so again, it waits for the place's last use. So a ring
    bounds the device's memory, and the host waits for nothing.

    Attributes:
        nbytes: of the block that is allocated next.
        memory: the block; None: nobody needs it.
    """

    def __init__(self, writer: Any, streams: SideStreams) -> None:
        """An empty ring. Args: writer: the stream that writes it; streams: the device's."""
        self._writer, self._streams = writer, streams
        self.memory: torch.Tensor | None = None
        self._uses: deque[_Use] = deque()
        self._at = 0
        self.nbytes = 0

    def take(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 that the writer may write; `used` has to follow. Args: nbytes: above 0.

        Raises:
            MemoryError: the device has none.
        """
        memory = self.memory
        if memory is None or memory.numel() < nbytes:
            memory = self._fresh(nbytes)
        start, uses = self._at, self._uses
        if start + nbytes > memory.numel():
            while uses and uses[0].start >= start:
                self._retire()
            start = 0
        stop = start + nbytes
        while uses and uses[0].start < stop and start < uses[0].stop:
            self._retire()
        self._at = start + -(-nbytes // ALIGN) * ALIGN
        return memory[start:stop]

    def used(self, place: torch.Tensor, last: Any) -> None:
        """The last use of a place has been issued. Args: see `_Use`; place: that `take` gave."""
        start = int(place.storage_offset())
        self._uses.append(_Use(start, start + place.numel(), last))

    @property
    def is_idle(self) -> bool:
        """Whether the device is done with all that was issued."""
        return not self._uses or bool(self._uses[-1].last.query())

    def close(self) -> None:
        """Let go of the block: the codec stream's next memory comes after all uses of it."""
        uses, codec = self._uses, self._streams.codec
        while uses:
            codec.wait_event(uses[0].last)
            uses.popleft()
        self.memory = None
        self._at = 0

    def _retire(self) -> None:
        # The oldest place is used again.
        self._writer.wait_event(self._uses[0].last)
        self._uses.popleft()

    def _fresh(self, nbytes: int) -> torch.Tensor:
        streams = self._streams
        self.close()
        self.memory = memory = streams.allocate(max(nbytes, self.nbytes))
        if self._writer is not streams.codec:  # whose earlier kernels may still use this memory
            event = streams.new_event()
            event.record(streams.codec)
            self._writer.wait_event(event)
        return memory
