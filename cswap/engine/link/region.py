"""`Region`: a tensor's place on the host, and the events of its way there and back.

Note [a region outlives its owner]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd holds the owner, and lets it go at any time. The streams of the device may touch the
tensor's memory for longer. So the region holds all memory: the tensor's own until it has been
read, and memory that it comes back into until the computation waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable
    from concurrent.futures import Future

    import torch

    from cswap.codecs.base import LateSize
    from cswap.engine.link.link_way import LinkWay
    from cswap.engine.link.trip import Trip
    from cswap.stores.disk import DiskFile

UNKNOWN: Final = -1
"""Bytes of an encoding whose size the host has not looked at."""


class RegionOwner(Protocol):
    """Stands for a tensor that is away.

    Attributes:
        region: that holds it.
        nbytes: of the tensor.
        position: of the tensor among those saved in its step.
        trip: to be told how it went; None: nobody asks.
    """

    region: Region
    nbytes: int
    position: int

    @property
    def trip(self) -> Trip | None:
        """See above."""
        ...


class Part:
    """A part of a region's tensor, which is encoded, copied and decoded by itself.

    Attributes:
        region: whose part it is.
        index: among the region's parts.
        start, numel: of the tensor, in elements.
        is_whole: whether there is no other part.
        bound: bytes that its encoding may have.
        host: memory of the host for the encoding; None: there is none (yet).
        address: of that.
        reserve: bytes that are copied there, whatever the encoding's size; 0: the encoding is
            copied when its size is known.
        encoded, left, arrived, decoded: events of the way out and back: on the codec stream, on
            the two copies' streams, and on the codec stream again.
        size: of the encoding, if that has to be looked at.
        nbytes: of the encoding; UNKNOWN: nobody has looked.
        pending: [bound] memory of the codec stream that holds the encoding until it is copied.
        kept: [nbytes] memory of the codec stream that holds it for good: the host had none.
        spills: the host store had no room: it goes on to the disk.
        file: on the disk; then there is no host memory.
        writing: that file, while it is being written.
    """

    __slots__ = (
        "address",
        "arrived",
        "bound",
        "decoded",
        "encoded",
        "file",
        "host",
        "index",
        "is_whole",
        "kept",
        "left",
        "nbytes",
        "numel",
        "pending",
        "region",
        "reserve",
        "size",
        "spills",
        "start",
        "writing",
    )

    def __init__(
        self,
        region: Region,
        index: int,
        cut: tuple[int, int, int],
        new_event: Callable[[], Any],
    ) -> None:
        """See the attributes. Args: cut: see `LinkWay`; new_event: makes one of torch's events."""
        self.region, self.index = region, index
        self.start, self.numel, self.bound = cut
        self.is_whole = not self.start and self.numel == region.way.flat[0]
        self.host: torch.Tensor | None = None
        self.address = self.reserve = self.nbytes = 0
        self.spills = False
        self.encoded, self.left, self.arrived, self.decoded = (new_event() for _ in range(4))
        self.size: int | LateSize | None = None
        self.pending: torch.Tensor | None = None
        self.kept: torch.Tensor | None = None
        self.file: DiskFile | None = None
        self.writing: Future[DiskFile | None] | None = None

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """This part of the elements x [n]."""
        return x if self.is_whole else x[self.start : self.start + self.numel]

    def lend(self, host: torch.Tensor | None, reserve: int) -> bool:
        """Take host memory for the encoding, of which so many bytes are copied; whether it is."""
        if host is None:
            return False
        self.reserve = min(reserve, host.numel())
        self.host, self.address = host, int(host.data_ptr())
        return True


class Region:
    """See the top. Used under the link's lock.

    Attributes:
        way: of its tensors.
        parts: of the tensor, in order.
        saved, issued: events of the user's stream: the tensor holds its values, and there is
            memory for it to come back into.
        read, ready: events after which the tensor's own memory has been read for the last time,
            and after which the memory that it comes back into holds its values.
        owner: weak reference to the tensor's packed object; a dead one: the region is to be
            released; `no_owner`: it is free.
        step: of that tensor.
        source: the tensor's own memory, until it has been read.
        address: of that, when it was saved.
        stream: on which it was saved.
        wanted: it will be asked for soon: its own memory is not let go.
        stays: its encoding cannot be used: the same.
        once: its host memory is of one tensor alone, and not used again.
        was_read: whether the host memory was read, by this tensor or one before.
        asked: whether the backward that runs has asked for it.
        memory: that it comes back into, until it is given away.
        home: stream that this memory belongs to.
        ahead: it is ready, or under way, before it is asked for.
        n_unsized: parts whose size is not known.
        capacity: bytes of the host store's memory.
        held_bytes, host_bytes: of the device's and of the host store's memory, as counted.
    """

    __slots__ = (
        "address",
        "ahead",
        "asked",
        "capacity",
        "held_bytes",
        "home",
        "host_bytes",
        "issued",
        "memory",
        "n_unsized",
        "once",
        "owner",
        "parts",
        "read",
        "ready",
        "saved",
        "source",
        "stays",
        "step",
        "stream",
        "wanted",
        "was_read",
        "way",
    )

    stream: Any
    home: Any

    def __init__(self, way: LinkWay, new_event: Callable[[], Any]) -> None:
        """Without host memory. Args: way: see above; new_event: makes one of torch's events."""
        self.way = way
        self.saved, self.issued = new_event(), new_event()
        self.parts: tuple[Part, ...] = tuple(
            Part(self, i, cut, new_event) for i, cut in enumerate(way.cuts)
        )
        last = self.parts[-1]
        self.read = last.left if way.verbatim else last.encoded
        self.ready = last.arrived if way.verbatim else last.decoded
        self.owner: Callable[[], RegionOwner | None] = no_owner
        self.step, self.address = -1, 0
        self.source: torch.Tensor | None = None
        self.memory: torch.Tensor | None = None
        self.once = not way.reserves
        self.wanted = self.stays = self.was_read = self.asked = self.ahead = False
        self.capacity = self.held_bytes = self.host_bytes = self.n_unsized = 0

    @property
    def serves(self) -> bool:
        """Whether the tensor's own memory, while it is held, has the values to be given back."""
        return self.stays or not self.way.round_trip


def no_owner() -> None:
    """The owner of a region that is free."""
