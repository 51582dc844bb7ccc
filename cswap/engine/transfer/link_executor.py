"""Swapping over a link, for tensors with a handle: the same way as that of slots (engine/link/)."""

from __future__ import annotations

from collections import Counter
from typing import TYPE_CHECKING, Final

from cswap.codecs.layout import torch_dtype
from cswap.codecs.registry import get_codec
from cswap.engine.link.link import Link
from cswap.engine.link.link_way import LinkWay
from cswap.engine.link.passage import Passage
from cswap.engine.link.trip import Trip
from cswap.engine.transfer.executor import Executor
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.resources import DAMAGED, checksum
from cswap.errors import CorruptEncodingError, InternalError, without_frames

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.devices.side_streams import SideStreams
    from cswap.engine.link.link_way import Part
    from cswap.engine.transfer.executor import Memory, WayPlace
    from cswap.engine.transfer.handle import Handle, Owner
    from cswap.engine.transfer.resources import Resources

MEASURE_EVERY: Final = 8
"""Tensors of a codec between two whose work is timed: that takes four more events."""


class LinkExecutor(Executor):
    """The executor of a device with a link."""

    link: Link

    def __init__(self, resources: Resources, streams: SideStreams) -> None:
        """Args: resources: of the device; streams: its own."""
        super().__init__(resources)
        self.link = Link(resources, streams)
        self._sent: Counter[str] = Counter()

    # -------------------------------------------------------------------- out

    def swap_out(
        self, token: Owner, x: torch.Tensor, codec: Codec, place: WayPlace | None = None
    ) -> None:
        """See `Executor.swap_out`."""
        handle = token.handle
        self.link.pump()
        while True:
            way = self._way(token, codec, place)
            self._decide(handle, codec, way.cuts)
            region = self.link.bind(way)
            if region is None:
                self._keep(handle, *self._no_room())
                return
            way.region = region
            trip = self._trip(handle, codec, len(way.cuts))
            passage = Passage(region, handle.raw_nbytes, handle.position, trip)
            if self._resources.verify and codec.lossless:
                passage.checksum = checksum(x)
            error = self.link.out.send(passage, x, handle.step)
            if error is None:
                self._leave(token, passage)
                if place is not None:
                    place.way = way
                return
            if codec.verbatim or isinstance(error, MemoryError):
                memory = isinstance(error, MemoryError)
                self._keep(handle, "memory" if memory else "raw:encode", error)
                return
            self._counters.fall_back(f"{codec.name}:encode", error)
            codec = get_codec("raw")

    def _no_room(self) -> tuple[str, str]:
        if self._resources.disk is None:
            return "host_limit", "full, and no spill_dir"
        return "disk", "it is full, or the host has no memory"

    def _way(self, token: Owner, codec: Codec, place: WayPlace | None) -> LinkWay:
        handle, recipe = token.handle, None if place is None else place.recipe
        planned = handle.planned
        device = self._resources.over_link
        part_bytes = (planned and planned.decision.section_bytes) or device.part_bytes
        dtype, nbytes, layout = torch_dtype(handle.meta.dtype), handle.raw_nbytes, None
        if (
            recipe is not None
            and handle.whole
            and recipe.contiguous
            and recipe.dtype is dtype
            and recipe.sizes.numel() * dtype.itemsize == nbytes
        ):
            layout = recipe.sizes, recipe.strides
        key = token.lane, codec, dtype, nbytes, part_bytes, layout
        before = None if place is None else place.way
        way = before if before is not None and before.key == key else LinkWay(*key)
        way.follow(planned)
        way.agree()
        return way

    def _trip(self, handle: Handle, codec: Codec, n_parts: int) -> Trip:
        self._sent[codec.name] += 1
        is_timed = not codec.verbatim and self._sent[codec.name] % MEASURE_EVERY == 1
        notes, n = handle.advice, n_parts
        return Trip(self._counters, handle.label, notes, codec.name, n, is_timed=is_timed)

    def _leave(self, token: Owner, passage: Passage) -> None:
        # It is on its way; its own memory is the region's now.
        way, handle = passage.region.way, token.handle
        if way.verbatim and passage.trip is not None:
            passage.trip.encoded(way.nbytes, way.nbytes)
        with self._lock:
            token.stored = passage
            handle.to(State.STORED)
            handle.let_go()
        # The link has counted it as one more, and its memory.
        self._counters.moves.append((-way.nbytes, 0, -1, "", 0, 0, 0.0))
        if self._resources.verify and not way.codec.lossless:
            self.link.settle(passage)
            if not passage.region.stays:  # else its encode has failed
                passage.checksum = self._stored_checksum(passage)

    # ------------------------------------------------------------------- back

    def check(self) -> None:
        """See `Executor.check`."""
        self._resources.raise_damage()

    def memory(self, token: Owner, *, expected: bool = True) -> Memory:
        """See `Executor.memory`."""
        self.check()
        return super().memory(token, expected=expected)

    def _fetch(self, token: Owner, *, expected: bool) -> Memory:
        handle, passage = token.handle, token.stored
        if not isinstance(passage, Passage):
            raise InternalError("a stored tensor is nowhere")
        region = passage.region
        if passage.checksum is not None and not region.way.codec.lossless:
            self._compare(handle, passage, self._stored_checksum(passage))
        source = region.source
        try:
            found = self.link.bring(passage, expected=expected)
        except CorruptEncodingError as error:
            handle.error = CorruptEncodingError(str(error))
            raise
        own = found is source
        if passage.checksum is not None and region.way.codec.lossless and not own:
            self._compare(handle, passage, checksum(found))
        if not handle.gathered:
            return found, own  # of a gathered one, it is memory of a dense copy
        return self._in_layout(handle, found), False

    def recount(self) -> None:
        """See `Executor.recount`."""
        self.link.recount()

    # ---------------------------------------------------------------- verify

    def _stored_checksum(self, passage: Passage) -> int:
        # Of the bytes on the host, or on the disk.
        self.link.settle(passage)
        return checksum(*map(self._bytes, passage.region.parts))

    def _bytes(self, part: Part) -> torch.Tensor:
        held = part.kept if part.kept is not None else part.host
        return (self.link.spill.fetch(part) if held is None else held)[: part.nbytes]

    def _compare(self, handle: Handle, passage: Passage, found: int) -> None:
        if found != passage.checksum:
            way = passage.region.way
            text = DAMAGED.format(way.codec.name, sum(p.nbytes for p in passage.region.parts))
            handle.error = without_frames(CorruptEncodingError(text))
            raise CorruptEncodingError(text)
