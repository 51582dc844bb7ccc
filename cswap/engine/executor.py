"""The swapping executor: moves one handle out and back, on any device.

Note [who holds what, until when]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
source      the tensor's own memory: the token's, until the event of every part's encode has fired
            (until the file is written, if the encoding goes to disk): dropped in `SwapOut`, or with
            the last packed view.
scratch     the encoder's output: from its job to `SwapOut._stored`.
host, file  the store's copy of a part: from the end of its encode until release; autograd may ask
            again (retain_graph), so a fetch does not give it up.
result      decoded memory: the token's, from `SwapIn.fetch` until every packed view has been asked
            for, or until `drop_result`.
Released while a job is under way: that job's callback frees the memory that it worked on.

Note [who waits for which event]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Several threads compute, and one may prefetch a tensor that another is about to ask for. Whoever
moves a handle to FETCHING clears `event` in the same breath and sets it, with `result`, once the
decode is submitted: so a thread that finds no event waits for there to be one, and a thread that
has waited for an event takes the result only if it is still that event's.

Note [interrupts]
~~~~~~~~~~~~~~~~~
A Ctrl-C can end any statement of the main thread. It goes up to the user. A handle's state is one
attribute, stored by one instruction, after the data that it promises are in place and before the
data that it no longer needs are let go. A thread that is interrupted between two states takes its
handle back to the one before (`SwapOut._take_back`, `Executor._take_back`). Sums that are off by
one tensor then are added up again by the engine.

Note [lossy and repeatable]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whether a tensor is out before backward asks for it is a matter of time, and so is whether there is
room for it. With a lossy codec its values would depend on that. Where torch is told to be
deterministic, a tensor for which a lossy codec was chosen has the codec's values in any case: if it
has stayed, it is encoded and decoded when it is asked for.

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
from cswap.engine.tiers import Patience, Tiers
from cswap.errors import to_raise

if TYPE_CHECKING:
    import torch

    from cswap.codecs.base import Codec
    from cswap.devices.base import Device, Event
    from cswap.engine.handle import Handle
    from cswap.stats.counters import Counters
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
        self._in = SwapIn(self._tiers, seed)

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
        try:
            with self._tiers.lock:
                if handle.state is not State.STORED or not handle.alive:
                    return False
                _begin_fetch(handle, prefetched=True)
            self._in.fetch(handle, "codec")
        except MemoryError as error:  # unpack will try again, and says so if it must
            self._tiers.counters.fall_back("prefetch", error)
            return False
        except BaseException:
            self._take_back(handle)
            raise
        return True

    def memory(self, handle: Handle) -> Memory:
        """The tensor's memory: its own if still held, else decoded.

        Computation that this thread issues from here on may read it.

        Raises:
            CorruptEncodingError: what came back is not what was stored.
            MemoryError: no memory to decode into.
        """
        if self._tiers.damage:
            raise to_raise(self._tiers.damage[0])
        patience = Patience()
        while True:
            if handle.state is State.ENCODING:
                self.stop(handle)
            event = handle.event
            found = self._fetch_or_wait(handle)
            if found is not None:
                return found
            if handle.event is event:  # between two jobs, on another thread
                patience.pause(handle)

    def _fetch_or_wait(self, handle: Handle) -> Memory | None:
        # None: something has happened, look again.
        mine = False
        try:
            with self._tiers.lock:
                found = self._at_hand(handle)
                if found is not None:
                    return found
                kept = handle.state is State.KEPT
                fetching, event = handle.state is State.FETCHING, handle.event
                if handle.state is State.STORED:
                    mine = fetching = True
                    _begin_fetch(handle, prefetched=False)
            if kept:
                return self._as_decoded(handle)
            start = time.perf_counter()
            if mine:
                event = self._in.fetch(handle, "compute")
            if event is None:  # another thread is about to submit it
                return None
            result = self._await(handle, event, start, fetching=fetching)
        except Exception:
            raise
        except BaseException:
            if mine:
                self._take_back(handle)
            raise
        return None if result is None else Memory(result, own=False)

    def _at_hand(self, handle: Handle) -> Memory | None:
        # Under the lock: memory that can be had without waiting.
        if handle.error is not None:
            raise to_raise(handle.error)
        source = handle.source
        if handle.state is State.KEPT and source is not None:
            if not handle.must_round_trip:
                return Memory(source, own=True)
            found = handle.recall()
        elif handle.state is State.READY and handle.result is not None:
            found = self._hit(handle, handle.result)
        else:
            found = handle.recall() if handle.state is State.STORED else None
        if found is None:
            return None
        self._tiers.device.share(found)
        return Memory(found, own=False)

    def _as_decoded(self, handle: Handle) -> Memory | None:
        # See Note [lossy and repeatable].
        source = handle.source
        if source is None:  # another thread has moved it meanwhile
            return None
        return Memory(self._in.round_trip(handle, source), own=False)

    def _await(
        self, handle: Handle, event: Event, start: float, *, fetching: bool
    ) -> torch.Tensor | None:
        # Waits for a job; the decoded memory if that is the job's product.
        if fetching:
            self._tiers.device.join(event)
        else:
            self._tiers.device.wait(event)
        end = time.perf_counter()
        self._tiers.counters.exposed(end - start)
        if self._tiers.counters.timeline is not None:
            self._tiers.counters.timeline.span("wait", handle.label, start, end)
        if not fetching:  # on the way out, errors were dealt with
            return None
        if event.error is not None:
            raise to_raise(event.error)
        with self._tiers.lock:  # on a GPU the decode may not have run: the device orders it
            if handle.event is not event or handle.result is None:
                return None
            self._tiers.device.share(handle.result)
            return self._hit(handle, handle.result)

    def stop(self, handle: Handle) -> None:
        """A handle that is still in its own memory is wanted there: do not move it at all."""
        with self._tiers.lock:
            if handle.state is not State.ENCODING:
                return
            handle.to(State.KEPT)
            self._out.waits_no_more(handle)
            self._tiers.counters.stay("wanted_early", handle.raw_nbytes)
        self._tiers.free(handle)

    def _take_back(self, handle: Handle) -> None:
        # See Note [interrupts]: this thread has begun a fetch that it will not finish.
        event = handle.event
        if event is not None:
            self._tiers.device.wait(event)
        self._tiers.device.drain()
        with self._tiers.lock:
            if handle.state is State.FETCHING:
                handle.to(State.STORED)
                handle.result = None

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
        """Nobody can ask for the handle any more: free all that no job needs."""
        with self._tiers.lock:
            before = handle.state
            if before is not State.RELEASED:
                handle.to(State.RELEASED)
                if before in (State.KEPT, State.ENCODING, State.READY):
                    self._tiers.counters.hold(device=-handle.raw_nbytes)
                if before is State.ENCODING:
                    self._out.waits_no_more(handle)
                if before in (State.ENCODING, State.IN_FLIGHT):
                    self._tiers.counters.stay("dropped", handle.raw_nbytes)
                handle.let_go()
                handle.result = None
        if before is not State.FETCHING:  # its callback does
            self._tiers.free(handle)

    def settle(self, handle: Handle) -> None:
        """Block until nothing is under way for the handle."""
        self._tiers.settle(handle)

    def recount(self, handles: list[Handle]) -> None:
        """After an interrupt: add up again the bytes of these handles, all that there are."""
        with self._tiers.lock:
            self._out.recount(handles)


def _begin_fetch(handle: Handle, *, prefetched: bool) -> None:
    # Under the lock. See Note [who waits for which event].
    handle.event, handle.prefetched = None, prefetched
    handle.to(State.FETCHING)
