"""`LinkWay`: how the tensors of one place go over a link; `Region`: where one of them is.

Note [a region outlives its owner]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Autograd holds the owner, and lets it go at any time. The streams of the device may touch the
tensor's memory for longer. So the region holds all memory: the tensor's own until it has been
read, and memory that it comes back into until the computation waits for that.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final, Protocol

from cswap.codecs.base import checked_bound
from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.devices.base import FLAT
from cswap.ranks import must_agree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

    import torch

    from cswap.codecs.base import Codec, LateSize
    from cswap.engine.link.trip import Trip
    from cswap.engine.order.plan_follower import Planned
    from cswap.stores.disk import DiskFile

UNKNOWN: Final = -1
"""Bytes of an encoding whose size the host has not looked at."""

PART_ALIGN: Final = 1 << 16
"""Parts begin at multiples of this many elements: whole tiles of every format."""

MARGIN: Final = 32
"""Of an encoding whose size varies, 1/MARGIN more is reserved in the host's memory."""

LOOSE: Final = 8
"""A way reserves at most 1/LOOSE more than its last encoding took, and LEAST_LOOSE bytes."""

LEAST_LOOSE: Final = 512


class WayLane(Protocol):
    """The part of a `Lane` that a way asks for."""

    ahead: int
    step_bytes: int | None
    executor: Any

    def fits_plan(self, nbytes: int) -> bool:
        """See `Lane.fits_plan`."""
        ...


class LinkWay:
    """See the top. Used under the link's lock, but for facts of the place.

    Attributes:
        key: the arguments by which it was made: a tensor with the same ones may go this way.
        lane: of the tensors' device.
        codec: of the tensors.
        dtype: of the tensors.
        nbytes: of a tensor.
        verbatim: whether they are copied as they are.
        as_it_is: whether they are copied in their own layout.
        sizes, strides: of the memory that one comes back into.
        flat: sizes of the memory of one, as elements.
        cuts: start, elements and bound of the encoding of each part.
        tolerance: of the codec.
        round_trip: whether they are to have the codec's values, whatever stays: see
            Note [lossy and repeatable] in executor.py.
        ahead: tensors that may come before one in backward when its way back begins.
        from_start: whether it may begin when backward does; a plan may say that it may not.
        reserves: bytes that are copied of each part's encoding. Empty: the sizes are not known yet,
            or a payload may change when its size is asked for.
        last_nbytes: of the parts' last encodings; empty: nobody knows.
        encoded_bytes: of the last tensor of which the advisor was not told; 0: there is none.
        regions: for the tensors, to be used again.
        region: of the last one.
        turn: in the order of the backward that runs; negative: it has none.
    """

    __slots__ = (
        "ahead",
        "as_it_is",
        "codec",
        "cuts",
        "dtype",
        "encoded_bytes",
        "flat",
        "from_start",
        "key",
        "lane",
        "last_nbytes",
        "nbytes",
        "region",
        "regions",
        "reserves",
        "round_trip",
        "sizes",
        "strides",
        "tolerance",
        "turn",
        "verbatim",
    )

    def __init__(
        self,
        lane: WayLane,
        codec: Codec,
        dtype: torch.dtype,
        nbytes: int,
        part_bytes: int | None,
        layout: tuple[torch.Size, tuple[int, ...]] | None,
    ) -> None:
        """A way of no tensor yet.

        Args:
            lane: see above.
            codec: see above.
            dtype: see above.
            nbytes: see above.
            part_bytes: larger tensors go in parts of this size at most; None: in one piece.
            layout: sizes and strides, if all of a tensor's memory is one tensor without gaps.
        """
        self.key = lane, codec, dtype, nbytes, part_bytes, layout
        self.lane, self.codec, self.dtype, self.nbytes = lane, codec, dtype, nbytes
        self.verbatim = codec.verbatim
        numel = nbytes // dtype.itemsize
        self.flat: tuple[int, ...] = (numel,)
        self.as_it_is = codec.verbatim and layout is not None
        self.sizes: tuple[int, ...] = self.flat
        self.strides: tuple[int, ...] = FLAT
        if codec.verbatim and layout is not None:
            self.sizes, self.strides = layout
        pieces = ((0, numel),) if codec.verbatim else _pieces(numel, dtype.itemsize, part_bytes)
        self.cuts = tuple((at, n, checked_bound(codec, dtype, n)) for at, n in pieces)
        self.tolerance = EXACT if codec.lossless else needed_tolerance(codec)
        self.round_trip = False
        self.ahead, self.from_start = lane.ahead, True
        self.reserves: tuple[int, ...] = (nbytes,) if codec.verbatim else ()
        self.last_nbytes: tuple[int, ...] = ()
        self.encoded_bytes = 0
        self.regions: list[Region] = []
        self.region: Region | None = None
        self.turn = -1

    def follow(self, planned: Planned | None) -> None:
        """Begin ways back as a plan says. Args: planned: None: there is no plan."""
        self.ahead = self.lane.ahead if planned is None else planned.swaps_ahead
        self.from_start = planned is None or planned.from_start

    def agree(self) -> None:
        """See ``round_trip``: whether it matters may change from step to step."""
        if not self.codec.lossless:
            self.round_trip = must_agree(lossy=True)

    @property
    def fits(self) -> bool:
        """Whether the last encodings were no larger than the reserves, and not much smaller."""
        if len(self.reserves) != len(self.last_nbytes):
            return False
        for reserve, nbytes in zip(self.reserves, self.last_nbytes, strict=True):
            if not nbytes <= reserve <= nbytes + nbytes // LOOSE + LEAST_LOOSE:
                return False
        return True

    def reserve(self) -> None:
        """Reserve as much as the parts' last encodings took, and a little more."""
        self.reserves = tuple(
            min(bound, with_margin(nbytes))
            for nbytes, (_, _, bound) in zip(self.last_nbytes, self.cuts, strict=True)
        )

    def region_of(self, step: int) -> Region | None:
        """The region of this step's tensor; None: there is none."""
        return next((region for region in self.regions if region.step == step), None)


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
        self.writing: Future[DiskFile] | None = None

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
        held_bytes, host_bytes: of the device's and of the host store's memory, as counted.
    """

    __slots__ = (
        "address",
        "ahead",
        "asked",
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
        self.held_bytes = self.host_bytes = self.n_unsized = 0

    @property
    def capacity(self) -> int:
        """Bytes of the host store's memory."""
        nbytes = 0
        for part in self.parts:
            if part.host is not None and not part.spills:
                nbytes += part.host.numel()
        return nbytes

    @property
    def serves(self) -> bool:
        """Whether the tensor's own memory, while it is held, has the values to be given back."""
        return self.stays or not self.way.round_trip


def no_owner() -> None:
    """The owner of a region that is free."""


def with_margin(nbytes: int) -> int:
    """Bytes to reserve for the next encoding of a tensor, if the last one has this size."""
    return nbytes + nbytes // MARGIN


def _pieces(numel: int, itemsize: int, part_bytes: int | None) -> Sequence[tuple[int, int]]:
    # Start and elements of each part.
    if part_bytes is None or numel * itemsize <= part_bytes:
        return ((0, numel),)
    step = max(1, part_bytes // itemsize // PART_ALIGN) * PART_ALIGN
    return [(start, min(step, numel - start)) for start in range(0, numel, step)]
