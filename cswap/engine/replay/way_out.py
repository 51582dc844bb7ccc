"""`WayOut`: brings tensors to the host, as they are or encoded. See Note [a way is issued once]."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import TYPE_CHECKING

from cswap.codecs.base import DEFAULT_KEY, EncodeKey, checked_size
from cswap.devices.cuda_memcpy import INFERRED
from cswap.engine.replay.region import UNKNOWN, no_owner
from cswap.engine.replay.ring import Ring
from cswap.engine.transfer.section import SECTION_SALT
from cswap.errors import without_frames
from cswap.stats.counters import NO_TENSOR, SAVED

if TYPE_CHECKING:
    from collections.abc import Iterable
    from threading import RLock

    import torch

    from cswap.devices.side_streams import SideStreams
    from cswap.engine.replay.region import Part, Region, RegionOwner
    from cswap.engine.replay.sources import Sources
    from cswap.engine.transfer.resources import Resources


class WayOut:
    """Of one link.

    Attributes:
        alive: regions whose tensor may be asked for, as far as is known.
        ring: scratch memory of encodings.
    """

    def __init__(
        self, resources: Resources, streams: SideStreams, sources: Sources, lock: RLock
    ) -> None:
        """Args: resources: of the device; streams: its own; sources, lock: of the link."""
        self._device, self._host, self._seed = resources.over_link, resources.host, resources.seed
        self._counters, self._streams = resources.counters, streams
        self._sources, self._lock = sources, lock
        self._unsized: deque[Part] = deque()
        self.alive: list[Region] = []
        self.ring = Ring(streams.codec, streams)
        sources.settle = self.settle

    def send(self, away: RegionOwner, x: torch.Tensor, step: int) -> bool:
        """Issue what brings a tensor to the host; whether that was possible.

        Args:
            away: of the tensor, with its position.
            x: the whole storage: [n] flat, or in the tensor's own layout.
            step: number of the step.
        """
        region, streams, nbytes = away.region, self._streams, away.nbytes
        slot, stream = region.slot, streams.current()
        host_bytes, moves = region.capacity, self._counters.moves
        with self._lock:
            self.alive.append(region)  # first: whatever comes in between, it is released
            region.step, region.stream, region.owner = step, stream, weakref.ref(away)
            region.source, region.address = x, x.data_ptr()  # before a stream reads it
            region.wanted = region.asked = region.stays = False
            region.saved.record(stream)
            try:
                if slot.verbatim:
                    part, d2h = region.parts[0], streams.d2h
                    d2h.wait_event(region.saved)
                    if region.was_read:
                        d2h.wait_event(part.arrived)
                    part.nbytes = nbytes
                    streams.memcpy(part.address, x.data_ptr(), nbytes, INFERRED, d2h.cuda_stream)
                    part.left.record(d2h)
                else:
                    streams.codec.wait_event(region.saved)
                    self._encode_all(region.parts, x, away)
            except BaseException as error:
                self._device.drain()  # a stream may be reading memory that nobody holds from here
                if not isinstance(error, Exception):
                    raise
                forget_encodings(region)  # the general way meets it again, and counts it
                region.owner, region.source = no_owner, None
                moves.append((-region.held_bytes, -region.host_bytes, *NO_TENSOR))
                region.held_bytes = region.host_bytes = 0
                self.alive.pop()
                return False
            region.held_bytes += nbytes
            region.host_bytes += host_bytes
            if slot.verbatim:
                name = slot.codec.name
                moves.append((nbytes, host_bytes, 1, name, nbytes, nbytes, 0.0))
            else:
                moves.append((nbytes, host_bytes, *SAVED))
                self.look()
            self._sources.add(region)
        return True

    def _encode_all(self, parts: Iterable[Part], x: torch.Tensor, away: RegionOwner) -> None:
        streams, key = self._streams, DEFAULT_KEY
        before = streams.before()
        try:
            streams.enter(streams.codec)
            for part in parts:
                if not part.region.slot.codec.lossless:
                    number = away.position + part.index * SECTION_SALT
                    key = EncodeKey(self._seed, number, part.region.step)
                self._encode(part, x if part.is_whole else part.of(x), key)
        finally:
            streams.leave(before)

    def _encode(self, part: Part, x: torch.Tensor, key: EncodeKey) -> None:
        region, streams, kept = part.region, self._streams, part.kept
        slot, side, d2h = region.slot, streams.codec, streams.d2h
        scratch = self.ring.take(part.bound)
        size = slot.codec.encode_flat(x, scratch, key=key, stream=side)
        part.encoded.record(side)
        part.size, part.nbytes = size, UNKNOWN
        if kept is None:
            d2h.wait_event(part.encoded)
            if region.was_read:
                d2h.wait_event(part.arrived)
            target, nbytes, out = part.address, part.reserve, d2h
        else:
            target, nbytes, out = kept.data_ptr(), kept.numel(), side
        streams.memcpy(target, scratch.data_ptr(), nbytes, INFERRED, out.cuda_stream)
        part.left.record(out)
        self.ring.used(scratch, part.left)
        region.n_unsized += 1  # last: whatever fails before, the parts are as many as before
        if type(size) is int:
            self._measure(part)
        else:
            self._unsized.append(part)

    # -------------------------------------------------------------------- sizes

    def look(self) -> None:
        """Look at the sizes of the encodings that have been made by now."""
        unsized = self._unsized
        while unsized and unsized[0].encoded.query():
            part = unsized.popleft()
            if part.nbytes == UNKNOWN:
                self._look(part)

    def settle(self, region: Region) -> None:
        """Look at all sizes of a region; the host waits, since there is no other way to know."""
        # Once more, if one has outgrown its reserve.
        while unsized := [part for part in region.parts if part.nbytes == UNKNOWN]:
            for part in unsized:
                if not part.encoded.query():
                    start_s = time.perf_counter()
                    part.encoded.synchronize()
                    self._counters.exposed(time.perf_counter() - start_s)
                self._look(part)
        count_unsized(region)

    def _look(self, part: Part) -> None:
        try:
            self._measure(part)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._device.drain()  # a copy may be under way that nobody knows of
                raise
            region, name = part.region, part.region.slot.codec.name
            part.nbytes, part.size = 0, None
            count_unsized(region)
            region.stays = True  # in its own memory, which is there
            self._counters.fall_back(f"{name}:encode", without_frames(error))

    def _measure(self, part: Part) -> None:
        region, size = part.region, part.size
        slot = region.slot
        assert size is not None  # since an encode was issued
        nbytes = checked_size(slot.codec, size, part.bound)
        if nbytes > (part.reserve if part.kept is None else part.kept.numel()):
            self._make_room(part, nbytes)
            region.n_unsized -= 1
            return
        part.nbytes, part.size = nbytes, None
        region.n_unsized -= 1
        if region.n_unsized or region.stays:
            return
        encoded_bytes = 0
        for each in region.parts:
            encoded_bytes += each.nbytes
        slot.encoded_bytes = encoded_bytes
        moved = (0, 0, 0, slot.codec.name, slot.nbytes, encoded_bytes, 0.0)
        self._counters.moves.append(moved)

    def _make_room(self, part: Part, nbytes: int) -> None:
        # The encoding is larger than its reserve: the tensor's own memory is there, see `Sources`,
        # so it is encoded once more.
        region, source = part.region, part.region.source
        owner = region.owner()
        if owner is None:  # nobody wants it
            part.nbytes, part.size = 0, None
            return
        if source is None or source.data_ptr() != region.address:  # of a storage that was resized
            raise RuntimeError("its memory is another one, and its encoding takes more than before")
        stays, region.stays = region.stays, True  # if an interrupt comes in between
        if not self._borrow(part, nbytes):
            if part.kept is not None:
                self._let_go_of_kept(part)
            part.kept = self._streams.allocate(nbytes)
            region.held_bytes += nbytes
            self._counters.moves.append((nbytes, 0, *NO_TENSOR))
            self._counters.fall_back("host_limit", "no memory", "encodings stay on the device")
        self._encode_all((part,), source, owner)
        region.parts[-1].encoded.record(self._streams.codec)  # `Region.read`
        region.stays = stays

    def _let_go_of_kept(self, part: Part) -> None:
        # Its encoding has grown once more. The memory is the codec stream's, which used it last.
        assert part.kept is not None  # the caller has looked
        nbytes, part.kept = part.kept.numel(), None
        part.region.held_bytes -= nbytes
        self._counters.moves.append((-nbytes, 0, *NO_TENSOR))

    def _borrow(self, part: Part, nbytes: int) -> bool:
        # More host memory for an encoding; whether there is any.
        streams, region, before = self._streams, part.region, part.loan.buffer
        loan = self._host.take(nbytes)
        if loan is None:
            return False
        if loan.after is not None:
            streams.wait(streams.d2h, loan.after)
        part.lend(loan, nbytes)
        if part.kept is not None:
            self._let_go_of_kept(part)
        self._host.give_back(before, streams.point(part.left, streams.d2h))
        more = loan.buffer.numel() - before.numel()
        region.capacity += more
        region.host_bytes += more
        self._counters.moves.append((0, more, *NO_TENSOR))
        return True

    # ------------------------------------------------------------------- memory

    def close_ring(self) -> None:
        """Keep no scratch memory, if the device is done with it."""
        if self.ring.memory is not None and self.ring.is_idle:
            self.ring.close()

    def trim(self) -> None:
        """Keep no scratch memory: no tensor is alive."""
        self._unsized.clear()
        self.ring.close()


def count_unsized(region: Region) -> None:
    """Count the parts anew whose size is not known: something came in between."""
    region.n_unsized = sum(part.nbytes == UNKNOWN for part in region.parts)


def forget_encodings(region: Region) -> None:
    """Nobody wants a region's encodings any more: their sizes are not asked for."""
    for part in region.parts:
        if part.nbytes == UNKNOWN:
            part.nbytes = 0
        part.size = part.kept = None
    region.n_unsized = 0
