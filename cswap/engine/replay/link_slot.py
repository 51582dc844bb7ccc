"""`LinkSlot`: one saved tensor of each step that leaves over a link."""

from __future__ import annotations

from typing import TYPE_CHECKING

from cswap.devices.base import FLAT
from cswap.engine.link.link_way import no_owner
from cswap.engine.replay.slot import CodecSlot
from cswap.engine.saved.aliases import ALIGNMENT
from cswap.engine.saved.away import Away

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.engine.link.link import Link
    from cswap.engine.link.link_way import LinkWay
    from cswap.engine.replay.slot import SlotPlace
    from cswap.engine.transfer.handle import Handle


class LinkSlot(CodecSlot):
    """See the top, and `Slot`.

    Attributes:
        link: that brings the tensors out and back.
        way: that they go.
    """

    __slots__ = ("link", "way")

    def __init__(
        self,
        handle: Handle,
        place: SlotPlace,
        check: Callable[[torch.Tensor], bool],
        way: LinkWay,
        link: Link,
    ) -> None:
        """See the attributes, and `CodecSlot`. Args: way, link: of the handle's tensor."""
        super().__init__(handle, place, check)
        self.link, self.way = link, way

    def is_for(self, handle: Handle, place: SlotPlace) -> bool:
        """See `Slot.is_for`."""
        return self.way is place.way and super().is_for(handle, place)

    def tell(self) -> None:
        """See `CodecSlot.tell`."""
        self.encoded_bytes, self.way.encoded_bytes = self.way.encoded_bytes, 0
        super().tell()

    def take(self, tensor: torch.Tensor, address: int, step: int) -> Away | None:
        """See `Slot.take`."""
        link, lane, way = self.link, self.lane, self.way
        region = way.region
        if link.is_capturing():
            return None
        if region is None or region.owner is not no_owner:
            region = link.bind(way)
            if region is None:
                return None
            way.region = region
        # A view of a view is one more tensor to make, and to let go.
        x = tensor.detach() if way.as_it_is else tensor.detach().as_strided(way.flat, FLAT, 0)
        packed = Away(
            tensor, self.recipe, lane, self.shared_use, self.nbytes, tolerance=way.tolerance
        )
        packed.link, packed.region = link, region
        if not way.as_it_is:
            packed.offset = offset = int(tensor.storage_offset())
            address -= offset * way.dtype.itemsize
        packed.aligned = not address % ALIGNMENT
        packed.position, packed.step = self.position, step
        if link.out.send(packed, x, step) is not None:
            return None  # the general way meets the error again, and counts it
        if lane.step_bytes is not None:
            lane.hold_step()
        if way.verbatim:
            way.encoded_bytes = self.nbytes
        return packed
