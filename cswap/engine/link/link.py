"""`Link`: brings tensors over a device's link to the host, and back.

Note [a way is issued once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
All work of a tensor's way is issued in one go, on three streams beside the user's, and ordered by
events that its region owns. The host waits for nothing, with one exception: the size of an encoding
is known on the device only. So a fixed number of bytes is copied, which the way reserves; the host
looks at the size later, before the tensor's own memory is let go. A tensor whose encoding has
become larger than its reserve is encoded once more. Where nothing is known yet, as in the first
step, the encoding waits in memory of its own, and is copied when the host has looked.

Memory is bounded in the order of the device, whatever the host's lead:

sources   tensors that a side stream has yet to read. Those that have been read are let go when the
          next tensor comes, but for those that backward wants next; beyond a bound, the user's
          stream waits for the oldest. In backward, the bound falls with each tensor that comes
          back: the link has carried as much out meanwhile, even if the host, far ahead of the
          device, has not seen it.
scratch   two rings: of encodings on their way out, and on their way back.
ahead     tensors that come back before they are asked for, up to a bound. Sources that were asked
          for count half: until these tensors are back, the link carries about half of them out.
          Those for which backward has not asked when the next step begins are let go again.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Final

from cswap.engine.link.ahead import Ahead
from cswap.engine.link.link_way import Region, no_owner
from cswap.engine.link.meter import Meter
from cswap.engine.link.sources import Sources
from cswap.engine.link.spill import Spill
from cswap.engine.link.way_back import WayBack
from cswap.engine.link.way_out import WayOut, count_unsized, forget_encodings
from cswap.stats.counters import NO_TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterable

    import torch

    from cswap.devices.side_streams import SideStreams
    from cswap.engine.link.link_way import LinkWay, RegionOwner
    from cswap.engine.transfer.resources import Resources

STEP_SHARE: Final = 32
"""Of the bytes that leave in a step, 1/STEP_SHARE may be under way, each way: small tensors are
saved in bursts, and the link needs some milliseconds of them. One tensor always may. On the twin's
H200 twice as many cost GPT-2 and Llama 0.1 to 0.3 GiB more, for 1 to 4 % of a step."""

PLAN_SHARE: Final = 16
"""The same with a plan."""

AT_A_TIME: Final = 3
"""Parts of the largest size whose encodings may be under way, and tensors of the largest size that
are copied as they are: one is made ready, one is copied, and one waits."""

MOST_WAIT_S: Final = 0.1
"""How long one waits for another thread, to release tensors that are gone; it is done later."""


class _UnderWay:
    """Needs of the ways of a step, from which the bounds of the bytes under way follow."""

    __slots__ = ("bound", "furthest", "is_planned", "most", "payload", "total")

    def __init__(self) -> None:
        self.bound = self.furthest = self.most = self.payload = self.total = 0
        self.is_planned = False

    def add(self, way: LinkWay, at_a_time: int) -> None:
        """One tensor goes this way. Args: at_a_time: tensors that are copied as they are."""
        self.is_planned = self.is_planned or way.lane.step_bytes is not None
        self.furthest = max(self.furthest, way.ahead)
        self.total += way.nbytes
        self.most = max(self.most, at_a_time * way.nbytes if way.verbatim else way.nbytes)
        if not way.verbatim:
            self.bound = max(self.bound, way.cuts[0][2])
            self.payload = max(self.payload, *(way.reserves or (way.cuts[0][2],)))

    @property
    def nbytes(self) -> int:
        """That may be under way, each way."""
        return max(self.most, self.total // (PLAN_SHARE if self.is_planned else STEP_SHARE))


class Link:
    """Of one engine and one device. Thread-safe.

    Attributes:
        out, back: the ways.
        sources: on the way out.
        spill: the way on to the disk of encodings for which the host has no room.
        meter: times work of the device.
        ahead: tensors that come back before they are asked for.
        alive: regions whose tensor may be asked for, as far as is known.
        planned_bytes: that may be under way, each way; 0: as many as the device bounds.
        spares: then one tensor at a time: memory counts more than time.
        is_capturing, prepare_thread: see `SideStreams`.
    """

    def __init__(self, resources: Resources, streams: SideStreams) -> None:
        """Args: resources: of the device; streams: its own."""
        self._resources, self._device = resources, resources.over_link
        self._host, self._counters = resources.host, resources.counters
        self._streams, self._lock = streams, threading.RLock()
        self.sources = Sources(streams, resources.counters)
        self.spill, self.meter = Spill(resources), Meter(streams)
        self.out = WayOut(resources, streams, self.sources, self.spill, self.meter, self._lock)
        self.back = WayBack(resources, streams, self.out, self.spill, self.meter)
        self.ahead = Ahead(resources, self.sources, self.back, self.spill)
        self.alive, self.is_capturing = self.out.alive, streams.is_capturing
        self.prepare_thread = streams.prepare_thread
        self._ways: set[LinkWay] = set()  # of the step
        self._under_way = _UnderWay()
        self._limit_bytes: int | None = None
        self.planned_bytes, self.spares = 0, False

    # --------------------------------------------------------------------- back

    def begin_backward(self) -> None:
        """A backward begins."""
        with self._lock:
            self.ahead.order.begin()
            self.sources.begin_backward()
            for region in self.alive:
                region.asked = False

    def start_first(self) -> None:
        """Backward asks for its first tensor, which stays: begin the first ways back.

        The computation for the tensors that stay hides them.
        """
        try:
            with self._lock:
                if not self.is_capturing():
                    self.ahead.start_first(self.alive)
        except BaseException:
            self._counters.interrupted = True
            raise

    def bring(self, away: RegionOwner, *, expected: bool = True) -> torch.Tensor:
        """The tensor's memory: its own if still held, else brought back.

        It is in the tensor's layout, or [n] flat. Computation that this thread issues from here on
        may read it.

        Args:
            away: of the tensor.
            expected: whether backward asks, and not somebody in between.

        Raises:
            CorruptEncodingError: values that were computed before may be wrong.
            MemoryError: no memory to copy into.
        """
        region, stream = away.region, self._streams.current()
        way, ahead = region.way, self.ahead
        if not way.verbatim:
            self._resources.raise_damage()
        with self._lock:
            if self.out.ring.memory is not None:
                self.out.close_ring()
            first = expected and not region.asked
            if first:
                if ahead.guessed:
                    ahead.check_guess(region)
                region.asked = True
                if region.source is not None:
                    self.sources.asks(region)
                ahead.order.asks(way, self.alive)
            memory = region.source
            if region.n_unsized and not region.serves:
                self.out.settle(region)  # it may have to stay
            if memory is None or not region.serves:
                memory = self._take(region, stream, first=first)
            else:
                if region.ahead:
                    region.ahead = False
                    ahead.nbytes -= way.nbytes
                if first:
                    self._counters.stay_early("wanted_early", way.nbytes)
                if stream is not region.stream:
                    memory.record_stream(stream)
            self.sources.let_go(max(0, self.sources.most_bytes - self.sources.came_bytes))
            if expected:
                ahead.go_on(way.turn, region.step)
        return memory

    def _take(self, region: Region, stream: Any, *, first: bool) -> torch.Tensor:
        if first:
            self._counters.hits.append(region.memory is not None)
        try:
            if region.memory is None:
                self.back.start(region)
            memory = region.memory
            assert memory is not None  # it was set there
            self._streams.stall(stream, region.ready)
            if stream is not region.home:
                memory.record_stream(stream)
            region.memory = None
            if first:
                self.sources.came_bytes += region.way.nbytes
        except BaseException:
            self._device.drain()  # a side stream may be writing memory that nobody holds now
            raise
        if region.ahead:
            nbytes = region.way.nbytes
            region.ahead = False
            self.ahead.nbytes -= nbytes
            region.held_bytes -= nbytes
            self._counters.moves.append((-nbytes, 0, *NO_TENSOR))
        return memory

    # ------------------------------------------------------------------ the dead

    def release_dead(self) -> None:
        """Release all that is held for tensors that nobody can ask for any more."""
        if not self.alive or self.is_capturing():  # which a question to the device would end
            return
        # Another thread may wait for this one's locks while it makes room on the device.
        if not self._lock.acquire(timeout=MOST_WAIT_S):
            return
        try:
            self.spill.look()
            self.sources.let_go(self.sources.most_bytes)
            alive = []
            for region in self.alive:
                if region.owner() is not None:
                    alive.append(region)
                else:
                    self._free(region)
            self.alive[:] = alive
        except BaseException:
            self._counters.interrupted = True
            raise
        finally:
            self._lock.release()

    def _free(self, region: Region) -> None:
        if region.source is not None:
            self.sources.drop(region)
        if region.ahead:
            self.ahead.drop(region)
        if region.memory is not None:
            region.home.wait_event(region.ready)
            region.memory = None
        if region.n_unsized:
            forget_encodings(region)
        for part in region.parts:
            part.kept = None
        self._counters.moves.append((-region.held_bytes, -region.host_bytes, *NO_TENSOR))
        region.held_bytes = region.host_bytes = 0
        region.owner = no_owner
        way = region.way
        if region.once and region in way.regions:
            way.regions.remove(region)
            if way.region is region:
                way.region = None
        if region not in way.regions:
            self.out.give_back(region)
            region.parts = ()  # which refer to it

    # --------------------------------------------------------------------- ways

    def begin_step(self, ways: Iterable[LinkWay], limit_bytes: int | None = None) -> None:
        """A step begins: bound the bytes under way.

        Args:
            ways: of this link, by which tensors are expected to go.
            limit_bytes: that may be under way, each way; None: no limit but the device's.
        """
        with self._lock:
            self.begin_backward()
            self.ahead.begin_step(self.alive)
            self._under_way, self._limit_bytes = _UnderWay(), limit_bytes
            expected = dict.fromkeys(ways)
            for way in expected:
                self._expect(way)
            self._set_bounds()
            self.release_dead()
            for way in self._ways.difference(expected):
                self.release(way)
                self._ways.discard(way)  # last: an interrupt leaves it for the next step

    def _expect(self, way: LinkWay) -> None:
        self._ways.add(way)
        if not way.verbatim:
            way.agree()
            if way.last_nbytes and not way.fits:
                self.release(way)
                way.reserve()
        self._under_way.add(way, 1 if self.spares else AT_A_TIME)

    def _set_bounds(self) -> None:
        device, needed = self._device, self._under_way
        most, ahead = needed.nbytes, self.ahead
        ready = device.ready_bytes
        ahead.furthest = needed.furthest
        ahead.most_bytes = self.planned_bytes or (ready if needed.is_planned else min(most, ready))
        self.sources.most_bytes = self.planned_bytes or min(most, device.backlog_bytes)
        if self._limit_bytes is not None:
            ahead.most_bytes = min(ahead.most_bytes, self._limit_bytes)
            self.sources.most_bytes = min(self.sources.most_bytes, self._limit_bytes)
        self.out.ring.nbytes = AT_A_TIME * needed.bound
        self.back.ring.nbytes = AT_A_TIME * needed.payload

    def bind(self, way: LinkWay) -> Region | None:
        """A region for a way's next tensor; None: there is no memory."""
        with self._lock:
            if way not in self._ways:  # the step's beginning did not know it
                self._expect(way)
                self._set_bounds()
            region = _free_one(way)
            if region is None and way.regions:
                self.release_dead()
                region = _free_one(way)
            return region or self._made(way) or self._made(way, again=True)

    def _made(self, way: LinkWay, *, again: bool = False) -> Region | None:
        # A new region. again: others may give their host memory back.
        if again:
            self.release_dead()
        region = Region(way, self._streams.new_event)
        for part, nbytes in zip(region.parts, way.reserves, strict=False):  # or there are none
            if not self.out.borrow(part, nbytes):
                self.out.give_back(region)
                return None
        way.regions.append(region)
        return region

    def release(self, way: LinkWay) -> None:
        """Give the host memory of a way back, as soon as its tensors are gone."""
        try:
            with self._lock:
                regions, way.regions, way.region = way.regions, [], None
                for region in regions:
                    if region.owner is no_owner:
                        self.out.give_back(region)
        except BaseException:
            self._counters.interrupted = True
            raise

    def settle(self, owner: RegionOwner) -> None:
        """Wait until nothing is under way to the host for a tensor."""
        with self._lock:
            self.out.settle(owner.region)
            for part in owner.region.parts:
                (part.left if part.kept is None else part.encoded).synchronize()
            self.spill.settle()
            self.pump()

    def drain(self) -> None:
        """Wait until nothing is under way for any tensor."""
        with self._lock:
            for region in self.alive:
                self.out.settle(region)
            self._device.drain()
            self.spill.settle()
            self.pump()

    def close(self) -> None:
        """Give back the host memory of all ways, as soon as their tensors are gone."""
        self.begin_step(())
        self.trim()

    # ------------------------------------------------------------------- memory

    def let_go_down_to(self, most_bytes: int) -> None:
        """Let go of tensors on their way out until so many bytes of them are left."""
        with self._lock:
            self.sources.let_go(most_bytes)

    def trim(self) -> None:
        """Keep no scratch memory, if no tensor needs it."""
        with self._lock:
            if not self.alive:
                self.out.trim()
                self.back.ring.close()

    def pump(self) -> None:
        """Look at what the device has done by now."""
        if self.is_capturing():
            return
        with self._lock:
            self.out.look()
            self.spill.look()
            self.meter.look()
            self._device.let_go_held()
            self.sources.let_go(self.sources.most_bytes)
            self.out.close_ring()

    def recount(self) -> None:
        """After an interrupt, while the device stands still: add up again what is held."""
        with self._lock:
            self.out.look()
            self.out.ring.close()
            self.back.ring.close()
            self.alive[:] = dict.fromkeys(self.alive)
            for region in self.alive:
                count_unsized(region)
                nbytes = region.way.nbytes
                n_held = (region.source is not None) + (region.memory is not None)
                kept = (part.kept for part in region.parts)
                region.held_bytes = n_held * nbytes + sum(k.numel() for k in kept if k is not None)
                region.host_bytes = region.capacity
            self.sources.recount(self.alive)
            self.ahead.nbytes = sum(r.way.nbytes for r in self.alive if r.ahead)
            self.pump()

    @property
    def scratch_bytes(self) -> int:
        """Bytes of the device's memory that encodings pass through."""
        rings = (self.out.ring.memory, self.back.ring.memory)
        pending = (part.pending for region in self.alive for part in region.parts)
        return sum(memory.numel() for memory in (*rings, *pending) if memory is not None)

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory that tensors hold."""
        return sum(region.held_bytes for region in self.alive)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that tensors hold."""
        return sum(region.host_bytes for region in self.alive)


def _free_one(way: LinkWay) -> Region | None:
    return next((region for region in way.regions if region.owner is no_owner), None)
