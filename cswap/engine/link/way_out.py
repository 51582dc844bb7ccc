"""`WayOut`: brings tensors to the host, as they are or encoded. See Note [a way is issued once]."""

from __future__ import annotations

import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from cswap.codecs.base import DEFAULT_KEY, checked_size, part_key
from cswap.devices.cuda_memcpy import INFERRED
from cswap.engine.link.link_way import UNKNOWN, no_owner
from cswap.engine.link.ring import Ring
from cswap.engine.link.trip import ENCODE
from cswap.errors import without_frames
from cswap.stats.counters import NO_TENSOR, SAVED

if TYPE_CHECKING:
    from collections.abc import Sequence
    from threading import RLock

    import torch

    from cswap.codecs.base import EncodeKey
    from cswap.devices.side_streams import SideStreams
    from cswap.engine.link.link_way import Part, Region, RegionOwner
    from cswap.engine.link.meter import Meter
    from cswap.engine.link.sources import Sources
    from cswap.engine.link.spill import Spill
    from cswap.engine.link.trip import Trip
    from cswap.engine.transfer.resources import Resources

COPY_OUT: Final = "copy out"

MOST_PLACED: Final = 2
"""Encodings that are copied at a time from memory of their own: one, while another is made."""


class _Placed(NamedTuple):
    # Memory of the codec stream that is being copied, and the event of its copy's end.
    memory: torch.Tensor
    left: Any


class WayOut:
    """Of one link. Used under its lock.

    Attributes:
        alive: regions whose tensor may be asked for, as far as is known.
        ring: scratch memory of encodings.
    """

    def __init__(
        self,
        resources: Resources,
        streams: SideStreams,
        sources: Sources,
        spill: Spill,
        meter: Meter,
        lock: RLock,
    ) -> None:
        """Args: resources: of the device; streams: its own; the others: of the link."""
        self._device, self._host, self._seed = resources.over_link, resources.host, resources.seed
        self._counters, self._streams = resources.counters, streams
        self._sources, self._spill, self._meter, self._lock = sources, spill, meter, lock
        self._unsized: deque[Part] = deque()
        self._placed: deque[_Placed] = deque()
        self.alive: list[Region] = []
        self.ring = Ring(streams.codec, streams)
        sources.settle = self.settle

    def send(self, owner: RegionOwner, x: torch.Tensor, step: int) -> Exception | None:
        """Issue the work that brings a tensor to the host.

        Args:
            owner: of the tensor, with its position.
            x: the whole tensor: [n] flat, or in its own layout.
            step: number of the step.

        Returns:
            None, or the reason why that was not possible.
        """
        region, streams, nbytes = owner.region, self._streams, owner.nbytes
        way, stream = region.way, streams.current()
        host_bytes, moves = region.capacity, self._counters.moves
        with self._lock:
            self.alive.append(region)  # first: whatever comes in between, it is released
            region.step, region.stream, region.owner = step, stream, weakref.ref(owner)
            region.source, region.address = x, x.data_ptr()  # before a stream reads it
            region.wanted = region.asked = region.stays = False
            region.saved.record(stream)
            try:
                if way.verbatim:
                    part, d2h = region.parts[0], streams.d2h
                    d2h.wait_event(region.saved)
                    if region.was_read:
                        d2h.wait_event(part.arrived)
                    part.nbytes = nbytes
                    if owner.trip is None:  # a call less
                        address, on = x.data_ptr(), d2h.cuda_stream
                        streams.memcpy(part.address, address, nbytes, INFERRED, on)
                        part.left.record(d2h)
                    else:
                        self._issue(part, x, nbytes, owner.trip)
                    if part.spills:
                        self._spill.add(part)
                else:
                    streams.codec.wait_event(region.saved)
                    self._encode_all(region.parts, x, owner)
            except BaseException as error:
                self._device.drain()  # a stream may be reading memory that nobody holds from here
                if not isinstance(error, Exception):
                    raise
                forget_encodings(region)
                region.owner, region.source = no_owner, None
                if region.once:
                    way.regions.remove(region)
                    way.region = None
                    self.give_back(region)
                moves.append((-region.held_bytes, -region.host_bytes, *NO_TENSOR))
                region.held_bytes = region.host_bytes = 0
                self.alive.pop()
                return without_frames(error)
            region.held_bytes += nbytes
            region.host_bytes += host_bytes
            if way.verbatim:
                moves.append((nbytes, host_bytes, 1, way.codec.name, nbytes, nbytes, 0.0))
            else:
                moves.append((nbytes, host_bytes, *SAVED))
                self.look()
            self._sources.add(region)
        return None

    def _encode_all(self, parts: Sequence[Part], x: torch.Tensor, owner: RegionOwner) -> None:
        streams, key, trip = self._streams, DEFAULT_KEY, owner.trip
        region = owner.region
        for part in parts:
            region.n_unsized += part.nbytes != UNKNOWN  # else it is one that has grown
            part.nbytes, part.size = UNKNOWN, None
        before = streams.before()
        try:
            streams.enter(streams.codec)
            for part in parts:
                if not region.way.codec.lossless:
                    key = part_key(self._seed, owner.position, part.index, region.step)
                self._encode(part, part.of(x), key, trip)
        finally:
            streams.leave(before)

    def _encode(self, part: Part, x: torch.Tensor, key: EncodeKey, trip: Trip | None) -> None:
        region, streams = part.region, self._streams
        codec, side, d2h = region.way.codec, streams.codec, streams.d2h
        scratch = self.ring.take(part.bound) if part.reserve else self._memory_for(part)
        timed = trip if trip is not None and trip.is_timed else None
        began = None if timed is None else self._meter.begin(side)
        size = codec.encode_flat(x, scratch, key=key, stream=side)
        if timed is not None:
            self._meter.end(began, side, timed, ENCODE, "codec", x.nbytes)
        part.encoded.record(side)
        part.size = size
        if part.reserve:
            d2h.wait_event(part.encoded)
            if region.was_read:
                d2h.wait_event(part.arrived)
            self._issue(part, scratch, part.reserve, timed)
            self.ring.used(scratch, part.left)
        else:
            part.pending = scratch
        if type(size) is int:
            self._measure(part)
        else:
            self._unsized.append(part)

    def _memory_for(self, part: Part) -> torch.Tensor:
        # Of the codec stream, for an encoding that waits for its size. Beyond the bound of the
        # tensors under way, the host waits for the oldest of these.
        most_bytes, unsized = max(self._sources.most_bytes, part.bound), self._unsized
        while unsized:
            pending_bytes = sum(one.bound for one in unsized if one.pending is not None)
            if pending_bytes + part.bound <= most_bytes:
                break
            self._wait_for_size(unsized[0])
            self.look()
        return self._streams.allocate(part.bound)

    def _issue(self, part: Part, source: torch.Tensor, nbytes: int, trip: Trip | None) -> None:
        # The copy of an encoding to the host.
        streams = self._streams
        d2h, is_drawn = streams.d2h, trip is not None and trip.is_drawn
        began = self._meter.begin(d2h) if is_drawn else None
        streams.memcpy(part.address, source.data_ptr(), nbytes, INFERRED, d2h.cuda_stream)
        if trip is not None and is_drawn:
            self._meter.end(began, d2h, trip, COPY_OUT, "d2h", nbytes)
        part.left.record(d2h)

    # -------------------------------------------------------------------- sizes

    def look(self) -> None:
        """Look at the sizes of the encodings that have been made by now."""
        unsized = self._unsized
        while unsized and unsized[0].encoded.query():
            part = unsized.popleft()
            if part.nbytes == UNKNOWN and part.size is not None:  # else it is about to be encoded
                self._look(part)

    def settle(self, region: Region) -> None:
        """Look at all sizes of a region; the host waits, since there is no other way to know."""
        # Once more, if one has outgrown its reserve. One without a size is about to be encoded, by
        # a caller that is out of memory.
        while unsized := [p for p in region.parts if p.nbytes == UNKNOWN and p.size is not None]:
            for part in unsized:
                self._wait_for_size(part)
                self._look(part)
        count_unsized(region)

    def _wait_for_size(self, part: Part) -> None:
        if not part.encoded.query():
            start_s = time.perf_counter()
            part.encoded.synchronize()
            self._counters.exposed(time.perf_counter() - start_s)

    def _look(self, part: Part) -> None:
        try:
            self._measure(part)
        except BaseException as error:
            if not isinstance(error, Exception):
                self._device.drain()  # a copy may be under way that nobody knows of
                raise
            region, name = part.region, part.region.way.codec.name
            part.nbytes, part.size, part.pending = 0, None, None
            count_unsized(region)
            region.stays = True  # in its own memory, which is there
            self._counters.fall_back(f"{name}:encode", without_frames(error))

    def _measure(self, part: Part) -> None:
        region, size = part.region, part.size
        way, owner = region.way, region.owner()  # held: room for the encoding may be made meanwhile
        assert size is not None  # since an encode was issued
        if owner is None:  # nobody wants it
            part.nbytes, part.size, part.pending = 0, None, None
            region.n_unsized -= 1
            return
        nbytes = checked_size(way.codec, size, part.bound)
        if part.pending is not None:
            self._place(part, part.pending, nbytes, owner.trip)
        elif nbytes > part.reserve:
            self._encode_again(part, owner)
            return
        part.nbytes, part.size = nbytes, None
        region.n_unsized -= 1
        if part.spills:
            self._spill.add(part)
        if region.n_unsized or region.stays:
            return
        sizes = tuple([each.nbytes for each in region.parts])
        way.encoded_bytes = encoded_bytes = sum(sizes)
        if not way.codec.late_payload and all(sizes):
            way.last_nbytes = sizes
        self._counters.moves.append((0, 0, 0, way.codec.name, way.nbytes, encoded_bytes, 0.0))
        if owner.trip is not None:
            owner.trip.encoded(way.nbytes, encoded_bytes)

    def _place(self, part: Part, pending: torch.Tensor, nbytes: int, trip: Trip | None) -> None:
        # The encoding's size is known: bring it to as much memory of the host.
        region, streams, placed = part.region, self._streams, self._placed
        if self.borrow(part, nbytes):
            if not part.spills:
                assert part.host is not None  # it was lent
                region.host_bytes += part.host.numel()
                self._counters.moves.append((0, part.host.numel(), *NO_TENSOR))
            streams.d2h.wait_event(part.encoded)
            self._issue(part, pending, nbytes, trip)
            placed.append(_Placed(pending, part.left))
            while len(placed) > MOST_PLACED:
                self._let_go_of_placed()
        else:
            part.kept = kept = streams.allocate(max(nbytes, 1))
            on, source = streams.codec.cuda_stream, pending.data_ptr()
            streams.memcpy(kept.data_ptr(), source, nbytes, INFERRED, on)
            part.encoded.record(streams.codec)  # not `left`: the ring may wait for that
            region.held_bytes += kept.numel()
            self._counters.moves.append((kept.numel(), 0, *NO_TENSOR))
            self._counters.fall_back("host_limit", "no memory", "encodings stay on the device")
        part.pending = None

    def borrow(self, part: Part, nbytes: int) -> bool:
        """Take memory of the host for an encoding; whether there is any.

        Args:
            part: of the tensor.
            nbytes: of the encoding, at most.
        """
        loan = self._host.take(nbytes)
        if loan is None:
            part.spills = part.lend(self._spill.memory(nbytes), nbytes)
            part.region.once = part.region.once or part.spills
            return part.spills
        if loan.after is not None:
            self._streams.d2h.wait_event(loan.after)
        part.lend(loan.buffer, nbytes)
        return True

    def _let_go_of_placed(self) -> None:
        self._streams.codec.wait_event(self._placed[0].left)  # whose memory it is
        self._placed.popleft()

    def _encode_again(self, part: Part, owner: RegionOwner) -> None:
        # The encoding is larger than its reserve: the tensor's own memory is there, see `Sources`.
        region, source = part.region, part.region.source
        if source is None or source.data_ptr() != region.address:  # of a storage that was resized
            raise RuntimeError("its memory is another one, and its encoding takes more than before")
        stays, region.stays = region.stays, True  # if an interrupt comes in between
        before = region.capacity
        self._give_back(part)
        less = before - region.capacity
        region.host_bytes -= less
        self._counters.moves.append((0, -less, *NO_TENSOR))
        self._encode_all((part,), source, owner)
        region.parts[-1].encoded.record(self._streams.codec)  # `Region.read`
        region.stays = stays

    # ------------------------------------------------------------------- memory

    def give_back(self, region: Region) -> None:
        """Let go of a region's memory of the host, which the device may still use."""
        for part in region.parts:
            self._give_back(part)

    def _give_back(self, part: Part) -> None:
        d2h, host = self._streams.d2h, part.host
        if part.region.was_read:
            d2h.wait_event(part.arrived)
        part.left.record(d2h)
        part.reserve = 0
        if part.spills:
            self._spill.drop(part)
            part.spills = False
        elif host is not None:
            part.host = None
            self._host.give_back(host, part.left)

    def close_ring(self) -> None:
        """Keep no scratch memory, if the device is done with it."""
        if self.ring.memory is not None and self.ring.is_idle:
            self.ring.close()
        while self._placed and self._placed[0].left.query():
            self._placed.popleft()

    def trim(self) -> None:
        """Keep no scratch memory: no tensor is alive."""
        self._unsized.clear()
        self.ring.close()
        while self._placed:
            self._let_go_of_placed()


def count_unsized(region: Region) -> None:
    """Count the parts anew whose size is not known: something came in between."""
    region.n_unsized = sum(part.nbytes == UNKNOWN for part in region.parts)


def forget_encodings(region: Region) -> None:
    """Nobody wants a region's encodings any more: their sizes are not asked for."""
    for part in region.parts:
        if part.nbytes == UNKNOWN:
            part.nbytes = 0
        part.size = part.pending = part.kept = None
    region.n_unsized = 0
