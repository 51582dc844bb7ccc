"""`Link`: brings the tensors of slots over a device's link, and back.

Note [a way is issued once]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
All work of a tensor's way is issued in one go, on three streams beside the user's, and ordered by
events that its region owns. The host waits for nothing, with one exception: the size of an encoding
is known on the device only. So a fixed number of bytes is copied, which the slot reserves; the host
looks at the size later, before the tensor's own memory is let go. A tensor whose encoding has
become larger than its reserve is encoded once more.

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

from cswap.engine.replay.ahead import Ahead
from cswap.engine.replay.region import Region, no_owner
from cswap.engine.replay.ring import ALIGN
from cswap.engine.replay.sources import Sources
from cswap.engine.replay.way_back import WayBack
from cswap.engine.replay.way_out import WayOut, count_unsized, forget_encodings
from cswap.stats.counters import NO_TENSOR

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    import torch

    from cswap.devices.side_streams import SideStreams
    from cswap.engine.replay.region import RegionOwner, RegionSlot
    from cswap.engine.transfer.resources import Resources
    from cswap.pool import Loan

STEP_SHARE: Final = 32
"""Of the bytes that leave in a step, 1/STEP_SHARE may be under way, each way: small tensors are
saved in bursts, and the link needs some milliseconds of them. One tensor always may. On the twin's
H200 twice as many cost GPT-2 and Llama 0.1 to 0.3 GiB more, for 1 to 4 % of a step."""

PLAN_SHARE: Final = 16
"""The same with a plan, as on the general way: see `Staging`."""

AT_A_TIME: Final = 3
"""Parts of the largest size whose encodings may be under way, and tensors of the largest size that
are copied as they are: one is made ready, one is copied, and one waits."""

MOST_WAIT_S: Final = 0.1
"""How long one waits for another thread, to release tensors that are gone; it is done later."""

LOOSE: Final = 8
"""A slot reserves at most 1/LOOSE more than its last encoding took."""


class Link:
    """Of one engine and one device. Thread-safe.

    Attributes:
        out, back: the ways.
        sources: on the way out.
        ahead: tensors that come back before they are asked for.
        alive: regions whose tensor may be asked for, as far as is known.
        planned_bytes: that may be under way, each way; 0: as many as the device bounds.
        is_capturing, prepare_thread: see `SideStreams`.
    """

    def __init__(self, resources: Resources, streams: SideStreams) -> None:
        """Args: resources: of the device; streams: its own."""
        self._resources, self._device = resources, resources.over_link
        self._host, self._counters = resources.host, resources.counters
        self._streams, self._lock = streams, threading.RLock()
        self.sources = Sources(streams, resources.counters)
        self.out = WayOut(resources, streams, self.sources, self._lock)
        self.back = WayBack(resources, streams, self.out)
        self.ahead = Ahead(resources, self.sources, self.back)
        self.alive, self.is_capturing = self.out.alive, streams.is_capturing
        self.prepare_thread = streams.prepare_thread
        self._slots: set[RegionSlot] = set()  # with regions
        self.planned_bytes = 0

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
        slot, ahead = region.slot, self.ahead
        if not slot.verbatim:
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
                ahead.order.asks(slot, self.alive)
            memory = region.source
            if region.n_unsized and not region.serves:
                self.out.settle(region)  # it may have to stay
            if memory is None or not region.serves:
                memory = self._take(region, stream, first=first)
            else:
                if region.ahead:
                    region.ahead = False
                    ahead.nbytes -= slot.nbytes
                if first:
                    self._counters.stay_early("wanted_early", slot.nbytes)
                if stream is not region.stream:
                    memory.record_stream(stream)
            self.sources.let_go(max(0, self.sources.most_bytes - self.sources.came_bytes))
            if expected:
                ahead.go_on(slot.turn, region.step)
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
                self.sources.came_bytes += region.slot.nbytes
        except BaseException:
            self._device.drain()  # a side stream may be writing memory that nobody holds now
            raise
        if region.ahead:
            nbytes = region.slot.nbytes
            region.ahead = False
            self.ahead.nbytes -= nbytes
            region.held_bytes -= nbytes
            self._counters.moves.append((-nbytes, 0, *NO_TENSOR))
        return memory

    # ------------------------------------------------------------------ the dead

    def release_dead(self) -> None:
        """Release all that is held for tensors that nobody can ask for any more."""
        if not self.alive:
            return
        # Another thread may wait for this one's locks while it makes room on the device.
        if not self._lock.acquire(timeout=MOST_WAIT_S):
            return
        try:
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
        if region not in region.slot.regions:
            self._give_back(region)

    def _give_back(self, region: Region) -> None:
        # The host memory of a region that is free, and of no use any more.
        streams = self._streams
        d2h = streams.d2h
        for part in region.parts:
            if region.was_read:
                d2h.wait_event(part.arrived)
            part.left.record(d2h)
            self._host.give_back(part.loan.buffer, streams.point(part.left, d2h))
        region.parts = ()  # which refer to it

    # -------------------------------------------------------------------- slots

    def begin_step(self, slots: Iterable[RegionSlot], limit_bytes: int | None = None) -> None:
        """A step begins: bound what is under way.

        Args:
            slots: of this link, that take tensors.
            limit_bytes: that may be under way, each way; None: no limit but the device's.
        """
        self.begin_backward()
        self.ahead.begin_step(self.alive)
        most = total = bound = payload = furthest = 0
        planned = False
        for slot in slots:
            planned = planned or slot.lane.step_bytes is not None
            furthest = max(furthest, slot.ahead)
            if not slot.verbatim:
                slot.prepare()
            total += slot.nbytes
            most = max(most, AT_A_TIME * slot.nbytes if slot.verbatim else slot.nbytes)
            if not slot.verbatim:
                bound = max(bound, slot.cuts[0][2])
                payload = max(payload, *slot.reserves)
        most = max(most, total // (PLAN_SHARE if planned else STEP_SHARE))
        self.ahead.furthest = furthest
        ahead = self._device.ready_bytes if planned else min(most, self._device.ready_bytes)
        self.ahead.most_bytes = self.planned_bytes or ahead
        self.sources.most_bytes = self.planned_bytes or min(most, self._device.backlog_bytes)
        if limit_bytes is not None:
            self.ahead.most_bytes = min(self.ahead.most_bytes, limit_bytes)
            self.sources.most_bytes = min(self.sources.most_bytes, limit_bytes)
        self.out.ring.nbytes, self.back.ring.nbytes = AT_A_TIME * bound, AT_A_TIME * payload
        self.release_dead()
        for slot in self._slots.difference(slots):
            self._slots.discard(slot)
            self.release(slot)

    def bind(self, slot: RegionSlot) -> Region | None:
        """A region for a slot's next tensor; None: there is no memory.

        Raises:
            MemoryError: the host has none, and does not say so otherwise.
        """
        with self._lock:
            self.release_dead()
            for region in slot.regions:
                if region.owner is no_owner:
                    return region
            loans: list[Loan] = []
            for nbytes in slot.reserves:
                loan = self._host.take(nbytes)
                if loan is None:
                    for other in loans:
                        after: Any = other.after
                        self._host.give_back(other.buffer, after)
                    return None
                if loan.after is not None:
                    self._streams.wait(self._streams.d2h, loan.after)
                loans.append(loan)
            region = Region(slot, loans, self._streams.new_event)
            slot.regions.append(region)
            self._slots.add(slot)
        return region

    def fit(self, slot: RegionSlot, sizes: Sequence[int]) -> None:
        """Reserve more or less, where the last encodings were larger or much smaller.

        Args:
            slot: of this link.
            sizes: bytes of each part's.
        """
        reserves = slot.reserves
        for n, nbytes in enumerate(sizes):
            # At first there are none.
            if not reserves or not nbytes <= reserves[n] <= nbytes + nbytes // LOOSE + 2 * ALIGN:
                self.release(slot)
                slot.reserve(sizes)
                return

    def release(self, slot: RegionSlot) -> None:
        """Give the host memory of a slot back, as soon as its tensors are gone."""
        try:
            with self._lock:
                regions, slot.regions, slot.region = slot.regions, [], None
                for region in regions:
                    if region.owner is no_owner:
                        self._give_back(region)
        except BaseException:
            self._counters.interrupted = True
            raise

    def close(self) -> None:
        """Give back the host memory of all slots, as soon as their tensors are gone."""
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
        with self._lock:
            self.out.look()
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
                nbytes = region.slot.nbytes
                n_held = (region.source is not None) + (region.memory is not None)
                kept = (part.kept for part in region.parts)
                region.held_bytes = n_held * nbytes + sum(k.numel() for k in kept if k is not None)
                region.host_bytes = region.capacity
            self.sources.recount(self.alive)
            self.ahead.nbytes = sum(r.slot.nbytes for r in self.alive if r.ahead)
            self.pump()

    @property
    def device_bytes(self) -> int:
        """Bytes of the device's memory that tensors hold."""
        return sum(region.held_bytes for region in self.alive)

    @property
    def host_bytes(self) -> int:
        """Bytes of the host's memory that tensors hold."""
        return sum(region.host_bytes for region in self.alive)
