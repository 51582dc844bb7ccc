"""`LinkSlot`: one saved tensor of each step that leaves over a link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.codecs.base import checked_bound
from cswap.codecs.tolerance import EXACT, needed_tolerance
from cswap.devices.base import FLAT
from cswap.engine.replay.region import Region, no_owner
from cswap.engine.replay.slot import CodecSlot
from cswap.engine.saved.aliases import ALIGNMENT
from cswap.engine.saved.away import Away
from cswap.engine.transfer.section import with_margin
from cswap.ranks import must_agree

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from cswap.engine.replay.link import Link
    from cswap.engine.replay.slot import SlotPlace
    from cswap.engine.transfer.handle import Handle


class LinkSlot(CodecSlot):
    """See the top, and `Slot`.

    Attributes:
        link: that brings the tensors out and back.
        ahead: tensors of slots that may come before one in backward when its way back begins.
        from_start: whether it may begin when backward does; a plan may say that it may not.
        verbatim: whether they are copied as they are.
        as_it_is: whether they are copied in their own layout.
        sizes, strides: of the memory that one comes back into.
        flat: sizes of the tensors' storage.
        dtype: of the tensors.
        tolerance: of the codec.
        round_trip: whether they are to have the codec's values, whatever stays: see
            Note [lossy and repeatable] in executor.py.
        cuts: start, elements and bound of the encoding of each part.
        sections: of the last tensor that had a handle.
        reserves: bytes that are copied of each part's encoding.
        regions: for the tensors of the slot.
        region: of the last one.
        turn: in the order of the backward that runs; negative: it has none.
    """

    __slots__ = (
        "ahead",
        "as_it_is",
        "cuts",
        "dtype",
        "flat",
        "from_start",
        "link",
        "region",
        "regions",
        "reserves",
        "round_trip",
        "sections",
        "sizes",
        "strides",
        "tolerance",
        "turn",
        "verbatim",
    )

    def __init__(
        self, handle: Handle, place: SlotPlace, check: Callable[[torch.Tensor], bool], link: Link
    ) -> None:
        """See the attributes, and `CodecSlot`. Args: link: of the place's lane."""
        super().__init__(handle, place, check)
        recipe, codec = place.recipe, self.codec
        self.link, self.verbatim = link, codec.verbatim
        self.dtype = recipe.dtype
        numel = self.nbytes // recipe.dtype.itemsize
        self.as_it_is = codec.verbatim and recipe.contiguous and recipe.sizes.numel() == numel
        self.sizes: tuple[int, ...] = recipe.sizes
        self.strides = recipe.strides
        if not self.as_it_is:
            self.sizes, self.strides = (numel,), FLAT
        self.flat = (numel,)
        self.tolerance = EXACT if codec.lossless else needed_tolerance(codec)
        self.round_trip = False
        self.note(handle)
        pieces = ((0, numel),) if codec.verbatim else ((s.start, s.numel) for s in handle.sections)
        self.cuts = tuple((at, n, checked_bound(codec, recipe.dtype, n)) for at, n in pieces)
        self.reserves: tuple[int, ...] = (self.nbytes,) if codec.verbatim else ()
        self.regions: list[Region] = []
        self.region: Region | None = None
        self.turn = -1

    def is_for(self, handle: Handle, place: SlotPlace) -> bool:
        """See `Slot.is_for`."""
        same_parts = self.verbatim or len(self.cuts) == len(handle.sections)
        return same_parts and super().is_for(handle, place)

    def note(self, handle: Handle) -> None:
        """Take notes of the last tensor of the place that had a handle."""
        self.sections, planned = handle.sections, handle.planned
        self.ahead = self.lane.ahead if planned is None else planned.swaps_ahead
        self.from_start = planned is None or planned.from_start

    def prepare(self) -> None:
        """A step begins: reserve host memory by the sizes of the last encodings."""
        if not self.codec.lossless:
            self.round_trip = must_agree(lossy=True)
        region = self.region
        sizes = [x.nbytes for x in (self.sections if region is None else region.parts)]
        if min(sizes, default=0) > 0:  # else they are not known, or nothing came of them
            self.link.fit(self, sizes)
        elif not self.reserves:
            self.reserves = tuple(bound for _, _, bound in self.cuts)

    def reserve(self, sizes: Sequence[int]) -> None:
        """Reserve as much as the parts' last encodings took, and a little more."""
        self.reserves = tuple(
            min(bound, with_margin(nbytes))
            for nbytes, (_, _, bound) in zip(sizes, self.cuts, strict=True)
        )

    def region_of(self, step: int) -> Region | None:
        """The region of the slot's tensor of this step; None: there is none."""
        return next((region for region in self.regions if region.step == step), None)

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Away | None:
        """See `Slot.take`."""
        link, lane, region = self.link, self.lane, self.region
        if link.is_capturing():
            return None
        if region is None or region.owner is not no_owner:
            region = link.bind(self)
            if region is None:
                return None
            self.region = region
        # A view of a view is one more tensor to make, and to let go.
        x = tensor.detach() if self.as_it_is else tensor.detach().as_strided(self.flat, FLAT, 0)
        packed = Away(
            tensor, self.recipe, lane, self.shared_use, self.nbytes, tolerance=self.tolerance
        )
        packed.link, packed.region = link, region
        if not self.as_it_is:
            packed.offset = offset = int(tensor.storage_offset())
            address -= offset * self.dtype.itemsize
        packed.aligned = not address % ALIGNMENT
        packed.position, packed.step = self.position, step
        if not link.out.send(packed, x, step):
            return None
        if lane.step_bytes is not None:
            lane.hold_step()
        if self.verbatim:
            self.encoded_bytes = self.nbytes
        return packed
