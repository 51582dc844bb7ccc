"""The swapping executor: moves one handle out and back, on any device.

Note [who holds what, until when]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
source      the tensor's own memory: held until the event of every part's encode has fired (until
            the file is written, if the encoding goes to disk), dropped in `SwapOut._safe`.
scratch     the encoder's output: from its job to `SwapOut._stored`.
host, file  the store's copy of a part: from `SwapOut._store` until release; autograd may ask again
            (retain_graph), so a fetch does not give it up.
result      decoded memory: from `SwapIn.fetch` until every packed view has been asked for, or until
            `drop_result`.
Released while a job is under way: that job's callback frees what it held.

Note [who waits for which event]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Several threads compute, and one may prefetch what another is about to ask for. Whoever moves a
handle to FETCHING clears `event` in the same breath and sets it, with `result`, once the decode is
submitted: so a thread that finds no event waits for there to be one, and a thread that has waited
for an event takes the result only if it is still that event's.

Jobs and callbacks run on threads of the device's choice. State changes under `lock`; no codec, no
copy and no wait does.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, NamedTuple

from cswap.engine.handle import State
from cswap.engine.swap_in import SwapIn
from cswap.engine.swap_out import SwapOut
from cswap.engine.tiers import BETWEEN_JOBS_S, Tiers

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.devices.base import Device, Event
    from cswap.engine.handle import Handle
    from cswap.engine.stats import Counters
    from cswap.stores.disk import DiskStore
    from cswap.stores.host import HostStore


class Memory(NamedTuple):
    """Where the values of a handle can be read.

    Attributes:
        tensor: [n] flat; strided if the handle is gathered.
        own: whether it is the memory that the tensor was saved from.
    """

    tensor: torch.Tensor
    own: bool


class Executor:
    """Runs swap-out and swap-in on one device."""

    def __init__(
        self,
        device: Device,
        host: HostStore,
        disk: DiskStore | None,
        counters: Counters,
        *,
        seed: int,
        verify: bool,
    ) -> None:
        self._tiers = Tiers(device, host, disk, counters, threading.Lock(), verify)
        self._out = SwapOut(self._tiers, seed)
        self._in = SwapIn(self._tiers)

    def swap_out(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """Encode a kept handle and move it to the store; returns before that is done.

        Args:
            handle: kept, and not modified since it was saved.
            x: its elements, [n] flat: the source itself, or a dense copy if gathered.
            codec: to encode with; must support the dtype.
        """
        self._out.start(handle, x, codec)

    def prefetch(self, handle: Handle) -> bool:
        """Start to bring a stored handle back, beside the computation; whether it was stored."""
        with self._tiers.lock:
            if handle.state is not State.STORED:
                return False
            _begin_fetch(handle, prefetched=True)
        try:
            self._in.fetch(handle, "codec")
        except MemoryError as error:  # unpack will try again, and says so if it must
            self._tiers.counters.fall_back("prefetch", error)
            return False
        return True

    def memory(self, handle: Handle) -> Memory:
        """The tensor's memory: its own if still held, else decoded.

        Computation that this thread issues from here on may read it.

        Raises:
            CorruptEncodingError: what came back is not what was stored.
            MemoryError: no memory to decode into.
        """
        if self._tiers.damage:
            raise self._tiers.damage[0]
        while True:
            if handle.state is State.ENCODING:
                self._stop(handle)
            with self._tiers.lock:
                found = self._at_hand(handle)
                if found is not None:
                    return found
                mine = handle.state is State.STORED
                if mine:
                    _begin_fetch(handle, prefetched=False)
                fetching, event = handle.state is State.FETCHING, handle.event
            start = time.perf_counter()
            if mine:
                event = self._in.fetch(handle, "compute")
            if event is None:  # another thread is about to submit it
                time.sleep(BETWEEN_JOBS_S)
                continue
            result = self._await(handle, event, start, fetching=fetching)
            if result is not None:
                return Memory(result, own=False)

    def _at_hand(self, handle: Handle) -> Memory | None:
        # Under the lock: what can be had without waiting.
        if handle.error is not None:
            raise handle.error
        if handle.state is State.KEPT and handle.source is not None:
            return Memory(handle.source, own=True)
        found = None
        if handle.state is State.READY and handle.result is not None:
            found = self._hit(handle, handle.result)
        elif handle.state is State.STORED:
            found = handle.recall()
        if found is None:
            return None
        self._tiers.device.share(found)
        return Memory(found, own=False)

    def _await(
        self, handle: Handle, event: Event, start: float, *, fetching: bool
    ) -> torch.Tensor | None:
        # Waits for a job; the decoded memory if that is what the job makes.
        if fetching:
            self._tiers.device.join(event)
        else:
            self._tiers.device.wait(event)
        end = time.perf_counter()
        self._tiers.counters.exposed(end - start)
        if self._tiers.counters.timeline is not None:
            self._tiers.counters.timeline.span("wait", handle, start, end)
        if not fetching:  # on the way out, errors were dealt with
            return None
        if event.error is not None:
            raise event.error
        with self._tiers.lock:  # on a GPU the decode may not have run: the device orders it
            if handle.event is not event or handle.result is None:
                return None
            self._tiers.device.share(handle.result)
            return self._hit(handle, handle.result)

    def _stop(self, handle: Handle) -> None:
        # Still in its own memory, and wanted now: do not move it at all.
        with self._tiers.lock:
            if handle.state is not State.ENCODING:
                return
            handle.to(State.KEPT)
            self._out.waits_no_more(handle)
            self._tiers.counters.stay("wanted_early", handle.raw_nbytes)
        self._tiers.free(handle)

    def _hit(self, handle: Handle, result: torch.Tensor) -> torch.Tensor:
        if handle.unpacked == 0:
            self._tiers.counters.fetched(hit=handle.prefetched)
        return result

    def drop_result(self, handle: Handle) -> None:
        """Let go of the decoded memory; users of it keep it alive themselves."""
        with self._tiers.lock:
            if handle.state is State.READY:
                handle.to(State.STORED)
                handle.forget()
                self._tiers.counters.hold(device=-handle.raw_nbytes)

    def release(self, handle: Handle) -> None:
        """Nobody can ask for the handle any more: free what no job needs."""
        with self._tiers.lock:
            before = handle.state
            if before is State.RELEASED:
                return
            handle.to(State.RELEASED)
            if before in (State.KEPT, State.ENCODING):
                handle.let_go()
                self._tiers.counters.hold(device=-handle.raw_nbytes)
                if before is State.ENCODING:
                    self._out.waits_no_more(handle)
            if before in (State.ENCODING, State.IN_FLIGHT):
                self._tiers.counters.stay("dropped", handle.raw_nbytes)
            if before is State.READY:
                handle.result = None
                self._tiers.counters.hold(device=-handle.raw_nbytes)
        if before is not State.FETCHING:  # its callback does
            self._tiers.free(handle)

    def settle(self, handle: Handle) -> None:
        """Block until nothing is under way for the handle."""
        self._tiers.settle(handle)


def _begin_fetch(handle: Handle, *, prefetched: bool) -> None:
    # Under the lock. See Note [who waits for which event].
    handle.to(State.FETCHING)
    handle.event, handle.prefetched = None, prefetched
