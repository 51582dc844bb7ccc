"""`WayBack`: brings tensors back from the host. See Note [a way is issued once] in link.py."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import torch

from cswap.devices.base import without_memory
from cswap.devices.cuda_memcpy import INFERRED
from cswap.engine.link.ring import Ring
from cswap.engine.link.trip import DECODE
from cswap.errors import InternalError

if TYPE_CHECKING:
    from cswap.devices.side_streams import SideStreams
    from cswap.engine.link.link_way import Part, Region
    from cswap.engine.link.meter import Meter
    from cswap.engine.link.spill import Spill
    from cswap.engine.link.trip import Trip
    from cswap.engine.link.way_out import WayOut
    from cswap.engine.transfer.resources import Resources

COPY_BACK: Final = "copy in"


class WayBack:
    """Of one link. Used under its lock.

    Attributes:
        ring: scratch memory of encodings.
    """

    def __init__(
        self, resources: Resources, streams: SideStreams, out: WayOut, spill: Spill, meter: Meter
    ) -> None:
        """Args: resources: of the device; streams: its own; the others: of the link."""
        self._device, self._streams, self._out = resources.over_link, streams, out
        self._spill, self._meter = spill, meter
        self.ring = Ring(streams.h2d, streams)

    def start(self, region: Region) -> None:
        """Issue the way back of a region's tensor; `Region.ready` is its end.

        Raises:
            CorruptEncodingError: a file is gone or damaged.
            InternalError: its encode has failed, so the tensor's own memory is to be taken.
            MemoryError: no memory to copy into.
            UnsupportedError: a mode makes tensors without memory.
        """
        way, streams = region.way, self._streams
        if region.n_unsized:
            self._out.settle(region)
        if region.stays:
            raise InternalError("a tensor is to come back that has not left")
        try:
            memory = self._device.allocate(way.sizes, way.strides, dtype=way.dtype)
        except RuntimeError as error:
            raise MemoryError(f"swap-in of {way.nbytes} bytes: {error}") from None
        if type(memory) is not torch.Tensor:
            raise without_memory(memory)
        home, owner = streams.current(), region.owner()
        trip = None if owner is None else owner.trip
        region.issued.record(home)
        region.was_read = True
        if way.verbatim:
            part, h2d = region.parts[0], streams.h2d
            h2d.wait_event(region.issued)
            if trip is None and not part.spills:  # a call less
                h2d.wait_event(part.left)
                target, on = memory.data_ptr(), h2d.cuda_stream
                streams.memcpy(target, part.address, part.nbytes, INFERRED, on)
                part.arrived.record(h2d)
            else:
                self._copy(part, memory, trip)
        else:
            self._decode_all(region, memory, trip)
        region.home, region.memory = home, memory

    def _decode_all(self, region: Region, memory: torch.Tensor, trip: Trip | None) -> None:
        streams, codec = self._streams, region.way.codec
        side, timed = streams.codec, trip if trip is not None and trip.is_timed else None
        side.wait_event(region.issued)
        before = streams.before()
        try:
            streams.enter(side)
            for part in region.parts:
                place = part.kept
                if place is None:
                    place = self.ring.take(max(part.nbytes, 1))
                    self._copy(part, place, trip)
                    side.wait_event(part.arrived)
                began = None if timed is None else self._meter.begin(side)
                codec.decode_flat(place[: part.nbytes], part.of(memory), stream=side)
                if timed is not None:
                    self._meter.end(began, side, timed, DECODE, "codec", part.nbytes)
                part.decoded.record(side)
                if place is not part.kept:
                    self.ring.used(place, part.decoded)
        finally:
            streams.leave(before)

    def _copy(self, part: Part, place: torch.Tensor, trip: Trip | None) -> None:
        # From the host, to memory that the copies' stream may write.
        streams, nbytes = self._streams, part.nbytes
        h2d, target = streams.h2d, place.data_ptr()
        read: torch.Tensor | None = None  # of a file
        if part.spills:
            read = self._spill.fetch(part)
        address = part.address if read is None else read.data_ptr()
        h2d.wait_event(part.left)
        drawn = trip if trip is not None and trip.is_drawn else None
        began: Any = None if drawn is None else self._meter.begin(h2d)
        streams.memcpy(target, address, nbytes, INFERRED, h2d.cuda_stream)
        if drawn is not None:
            self._meter.end(began, h2d, drawn, COPY_BACK, "h2d", nbytes)
        part.arrived.record(h2d)
        if read is not None:
            self._device.hold(read, part.arrived)
