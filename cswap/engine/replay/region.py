"""`Region`: host memory for the tensors of one slot, one at a time, and the events of their way.

Note [a region outlives its owner]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd holds the owner, and lets it go at any time. The streams of the device may touch the
tensor's memory for longer. So the region holds all memory: the tensor's own until it has been
read, and memory that it comes back into until the computation waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from cswap.codecs.base import Codec, LateSize
    from cswap.pool import Loan

UNKNOWN: Final = -1
"""Bytes of an encoding whose size the host has not looked at."""


class RegionSlot(Protocol):
    """The part of a `LinkSlot` that a link asks for."""

    nbytes: int
    codec: Codec
    lane: Any
    verbatim: bool
    as_it_is: bool
    round_trip: bool
    cuts: tuple[tuple[int, int, int], ...]
    reserves: tuple[int, ...]
    ahead: int
    from_start: bool
    encoded_bytes: int
    turn: int
    flat: tuple[int]
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype
    regions: list[Region]
    region: Region | None

    def prepare(self) -> None: ...  # noqa: D102 - see `LinkSlot`
    def reserve(self, sizes: Sequence[int]) -> None: ...  # noqa: D102
    def region_of(self, step: int) -> Region | None: ...  # noqa: D102


class RegionOwner(Protocol):
    """The part of an `Away` that a link asks for."""

    region: Region
    nbytes: int
    position: int
    lane: Any


class Part:
    """A part of a region's tensor, which is encoded, copied and decoded by itself.

    Attributes:
        region: whose part it is.
        index: among the region's parts.
        start, numel: of the tensor, in elements.
        is_whole: whether there is no other part.
        bound: bytes that its encoding may have.
        loan: host memory for the encoding.
        address: of that.
        reserve: bytes that are copied there, whatever the encoding's size.
        encoded, left, arrived, decoded: events of the way out and back: on the codec stream, on
            the two copies' streams, and on the codec stream again.
        size: of the encoding, if that has to be looked at.
        nbytes: of the encoding; UNKNOWN: nobody has looked.
        kept: memory of the codec stream instead: the host had none.
    """

    __slots__ = (
        "address",
        "arrived",
        "bound",
        "decoded",
        "encoded",
        "index",
        "is_whole",
        "kept",
        "left",
        "loan",
        "nbytes",
        "numel",
        "region",
        "reserve",
        "size",
        "start",
    )

    def __init__(
        self,
        region: Region,
        index: int,
        cut: tuple[int, int, int],
        loan: Loan,
        new_event: Callable[[], Any],
    ) -> None:
        """See the attributes. Args: cut: see `LinkSlot`; new_event: makes one of torch's events."""
        self.region, self.index = region, index
        self.start, self.numel, self.bound = cut
        self.is_whole = not self.start and self.numel == region.slot.flat[0]
        self.lend(loan, region.slot.reserves[index])
        self.encoded, self.left, self.arrived, self.decoded = (new_event() for _ in range(4))
        self.size: int | LateSize | None = None
        self.nbytes = 0
        self.kept: torch.Tensor | None = None

    def of(self, x: torch.Tensor) -> torch.Tensor:
        """This part of the elements x [n]."""
        return x[self.start : self.start + self.numel]

    def lend(self, loan: Loan, reserve: int) -> None:
        """Host memory for the encoding, of which so many bytes are copied."""
        self.reserve = min(reserve, loan.buffer.numel())
        self.loan, self.address = loan, int(loan.buffer.data_ptr())


class Region:
    """See the top. Used under the link's lock.

    Attributes:
        slot: whose tensors it holds.
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
        was_read: whether the host memory was read, by this tensor or one before.
        asked: whether the backward that runs has asked for it.
        memory: that it comes back into, until it is given away.
        home: stream that this memory belongs to.
        ahead: it is ready, or under way, before it is asked for.
        n_unsized: parts whose size is not known.
        capacity: bytes of the host memory.
        held_bytes, host_bytes: of the device's and of the host's memory, as counted.
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
        "owner",
        "parts",
        "read",
        "ready",
        "saved",
        "slot",
        "source",
        "stays",
        "step",
        "stream",
        "wanted",
        "was_read",
    )

    stream: Any
    home: Any

    def __init__(self, slot: RegionSlot, loans: list[Loan], new_event: Callable[[], Any]) -> None:
        """See the attributes. Args: loans: of each part; new_event: makes one of torch's events."""
        self.slot = slot
        self.saved, self.issued = new_event(), new_event()
        self.parts: tuple[Part, ...] = tuple(
            Part(self, i, cut, loan, new_event)
            for i, (cut, loan) in enumerate(zip(slot.cuts, loans, strict=True))
        )
        last = self.parts[-1]
        self.read = last.left if slot.verbatim else last.encoded
        self.ready = last.arrived if slot.verbatim else last.decoded
        self.owner: Callable[[], RegionOwner | None] = no_owner
        self.step, self.address = -1, 0
        self.source: torch.Tensor | None = None
        self.memory: torch.Tensor | None = None
        self.wanted = self.stays = self.was_read = self.asked = self.ahead = False
        self.held_bytes = self.host_bytes = self.n_unsized = 0
        self.capacity = sum(loan.buffer.numel() for loan in loans)

    @property
    def serves(self) -> bool:
        """Whether the tensor's own memory, while it is held, has the values to be given back."""
        return self.stays or not self.slot.round_trip


def no_owner() -> None:
    """The owner of a region that is free."""
