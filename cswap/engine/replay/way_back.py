"""`WayBack`: brings tensors back from the host. See Note [a way is issued once] in link.py."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from cswap.devices.base import without_memory
from cswap.devices.cuda_memcpy import INFERRED
from cswap.engine.replay.ring import Ring
from cswap.errors import InternalError

if TYPE_CHECKING:
    from cswap.devices.side_streams import SideStreams
    from cswap.engine.replay.region import Part, Region
    from cswap.engine.replay.way_out import WayOut
    from cswap.engine.transfer.resources import Resources


class WayBack:
    """Of one link. Used under its lock.

    Attributes:
        ring: scratch memory of encodings.
    """

    def __init__(self, resources: Resources, streams: SideStreams, out: WayOut) -> None:
        """Args: resources: of the device; streams: its own; out: of the link."""
        self._device, self._streams, self._out = resources.over_link, streams, out
        self.ring = Ring(streams.h2d, streams)

    def start(self, region: Region) -> None:
        """Issue the way back of a region's tensor; `Region.ready` is its end.

        Raises:
            InternalError: its encode has failed, so the tensor's own memory is to be taken.
            MemoryError: no memory to copy into.
            UnsupportedError: a mode makes tensors without memory.
        """
        slot, streams = region.slot, self._streams
        if region.n_unsized:
            self._out.settle(region)
        if region.stays:
            raise InternalError("a tensor is to come back that has not left")
        try:
            memory = self._device.allocate(slot.sizes, slot.strides, dtype=slot.dtype)
        except RuntimeError as error:
            raise MemoryError(f"swap-in of {slot.nbytes} bytes: {error}") from None
        if type(memory) is not torch.Tensor:
            raise without_memory(memory)
        home = streams.current()
        region.issued.record(home)
        region.was_read = True
        if slot.verbatim:
            part, h2d = region.parts[0], streams.h2d
            h2d.wait_event(region.issued)
            h2d.wait_event(part.left)
            target, stream = memory.data_ptr(), h2d.cuda_stream
            streams.memcpy(target, part.address, part.nbytes, INFERRED, stream)
            part.arrived.record(h2d)
        else:
            self._decode_all(region, memory)
        region.home, region.memory = home, memory

    def _decode_all(self, region: Region, memory: torch.Tensor) -> None:
        streams, codec = self._streams, region.slot.codec
        side = streams.codec
        side.wait_event(region.issued)
        before = streams.before()
        try:
            streams.enter(side)
            for part in region.parts:
                place = part.kept
                if place is None:
                    place = self._copy(part)
                    side.wait_event(part.arrived)
                out = memory if part.is_whole else part.of(memory)
                codec.decode_flat(place[: part.nbytes], out, stream=side)
                part.decoded.record(side)
                if place is not part.kept:
                    self.ring.used(place, part.decoded)
        finally:
            streams.leave(before)

    def _copy(self, part: Part) -> torch.Tensor:
        streams, nbytes = self._streams, part.nbytes
        h2d, place = streams.h2d, self.ring.take(max(nbytes, 1))
        h2d.wait_event(part.left)
        streams.memcpy(place.data_ptr(), part.address, nbytes, INFERRED, h2d.cuda_stream)
        part.arrived.record(h2d)
        return place
