"""`LinkWay`: how the tensors of one place in the step go over a link, step after step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from cswap.codecs.base import checked_bound
from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.devices.base import FLAT
from cswap.ranks import must_agree

if TYPE_CHECKING:
    from collections.abc import Sequence

    import torch

    from cswap.codecs.base import Codec
    from cswap.engine.link.region import Region
    from cswap.engine.order.plan_follower import Planned
    from cswap.engine.transfer.device_lanes import Lane

PART_ALIGN: Final = 1 << 16
"""Parts begin at multiples of this many elements: whole tiles of every format."""

MARGIN: Final = 32
"""Of an encoding whose size varies, 1/MARGIN more is reserved in the host's memory."""


class LinkWay:
    """See the top.

    Attributes:
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
        lane: Lane,
        codec: Codec,
        dtype: torch.dtype,
        nbytes: int,
        *,
        part_bytes: int | None,
        layout: tuple[torch.Size, tuple[int, ...]] | None = None,
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

    def is_like(self, other: LinkWay) -> bool:
        """Whether tensors of the other way may go this one."""
        return (
            self.lane is other.lane
            and self.codec is other.codec
            and self.dtype is other.dtype
            and self.nbytes == other.nbytes
            and self.cuts == other.cuts
            and (self.sizes, self.strides) == (other.sizes, other.strides)
        )

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


LOOSE: Final = 8
"""A way reserves at most 1/LOOSE more than its last encoding took, and LEAST_LOOSE bytes."""

LEAST_LOOSE: Final = 512


def with_margin(nbytes: int) -> int:
    """Bytes to reserve for the next encoding of a tensor, if the last one has this size."""
    return nbytes + nbytes // MARGIN


def _pieces(numel: int, itemsize: int, part_bytes: int | None) -> Sequence[tuple[int, int]]:
    # Start and elements of each part.
    if part_bytes is None or numel * itemsize <= part_bytes:
        return ((0, numel),)
    step = max(1, part_bytes // itemsize // PART_ALIGN) * PART_ALIGN
    return [(start, min(step, numel - start)) for start in range(0, numel, step)]
