"""The swapping executor: moves one handle out and back.

There are two kinds. Where host memory is the device's own (a CPU), a swap-out is an encode into it
and a swap-in a decode from it, each by the thread that asks (host_executor.py). Where there is a
link, copies lie in between, the host is ahead of the device, and tensors are decoded ahead of their
use (link_executor.py). Events are of a link.

Note [owners of memory]
~~~~~~~~~~~~~~~~~~~~~~~
source      the tensor's own memory: its owner's, until every section has been read for the last
            time, or until the last packed view goes.
scratch     the encoder's output: from its job until its copy.
host, file  the store's copy of a section: from the end of its encode until release; autograd may
            ask again (retain_graph), so a fetch does not give it up.
result      decoded memory: the caller's. Kept only while another packed view has yet to be asked
            for, or while nobody has asked for a tensor that was decoded ahead.

Note [interrupts]
~~~~~~~~~~~~~~~~~
A Ctrl-C can end any statement of the main thread. It goes up to the user. A handle's state is one
attribute, stored by one instruction, after the data that it promises are in place and before the
data that it no longer needs are let go. A thread that is interrupted between two states takes its
handle back to the one before (`_take_back`). Sums that are off by one tensor then are added up
again by the engine.

Note [lossy and repeatable]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whether a tensor is out before backward asks for it is a matter of time, and so is whether there is
room for it. With a lossy codec its values would depend on that. Where torch is told to be
deterministic, and where there are several ranks (ranks.py), a tensor for which a lossy codec was
chosen has the codec's values in any case: if it has stayed, it is encoded and decoded when it is
asked for.

Several threads may compute, and a device with a link runs callbacks on a thread of its choice. A
state changes under `lock`; no codec, no copy and no wait runs there.
"""

from __future__ import annotations

import abc
import time
from typing import TYPE_CHECKING, TypeAlias

import torch

from cswap.advisor.live_costs import REMAT
from cswap.codecs.base import checked_bound, checked_size
from cswap.codecs.layout import empty_strided, torch_dtype, unflatten_into
from cswap.devices.base import FLAT, without_memory
from cswap.engine.transfer.handle import ON_DEVICE, State
from cswap.engine.transfer.resources import Patience
from cswap.engine.transfer.section import INDICES, Checked
from cswap.errors import to_raise
from cswap.ranks import must_agree

if TYPE_CHECKING:
    from cswap.codecs.base import Codec
    from cswap.devices.base import Event
    from cswap.engine.replay.link import Link
    from cswap.engine.transfer.ahead import Ahead
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.in_line import InLine
    from cswap.engine.transfer.resources import Resources
    from cswap.engine.transfer.staging import Staging


Memory: TypeAlias = tuple[torch.Tensor, bool]
"""Where the values of a handle can be read: memory with any layout, and whether that is the memory
that the tensor was saved from."""


class Executor(abc.ABC):
    """Runs swap-out and swap-in on one device.

    Attributes:
        in_line: encodes tensors without handles; None: every encoding of this device has one.
        link: brings tensors of slots over a link; None: there is none.
        staging: bounds the bytes under way over a link; None: there is none.
    """

    in_line: InLine | None = None
    link: Link | None = None
    staging: Staging | None = None

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._resources = resources
        self._device = resources.device
        self._lock = resources.lock
        self._counters = resources.counters
        self._ahead: dict[int, Ahead] = {}

    @abc.abstractmethod
    def swap_out(self, handle: Handle, x: torch.Tensor, codec: Codec) -> None:
        """Encode a kept handle and move it to the store; over a link, that is done later.

        Args:
            handle: kept, and not modified since it was saved.
            x: its elements, [n] flat: the source itself, or a dense copy if gathered.
            codec: to encode with; must support the dtype.
        """

    @abc.abstractmethod
    def _fetch(self, handle: Handle) -> torch.Tensor:
        """Bring a stored handle back for the computation of this thread; its memory.

        Raises:
            CorruptEncodingError: the stored bytes were damaged.
            MemoryError: no memory to decode into.
        """

    @abc.abstractmethod
    def settle(self, handle: Handle) -> None:
        """Block until nothing is under way for the handle."""

    def prefetch(self, handle: Handle) -> bool:
        """Start to bring a stored handle back, beside the computation; whether it was stored.

        Where host memory is the device's own, nothing is decoded ahead of its use.
        """
        del handle
        return False

    def recompute_later(self, handle: Handle) -> None:
        """Let go of a kept handle's memory: its owner knows how to compute it again."""
        with self._lock:
            if handle.state is not State.KEPT:
                return
            handle.recomputed = True
            handle.to(State.STORED)
            handle.let_go()
        self._counters.swapped_out(REMAT, handle.raw_nbytes, 0, 0.0, device=-handle.raw_nbytes)

    def memory(self, handle: Handle, *, again: bool = False) -> Memory:
        """The tensor's memory: its own if still held, else decoded, or computed again.

        Computation that this thread issues from here on may read it.

        Args:
            handle: the handle.
            again: it will be asked for once more soon.

        Raises:
            CorruptEncodingError: the stored bytes were damaged.
            MemoryError: no memory to decode into.
        """
        patience: Patience | None = None
        while True:
            if handle.state is State.LEAVING:
                self.stop(handle)
            with self._lock:
                found = self._at_hand(handle)
                state, event = handle.state, handle.event
            if found is not None:
                if event is not None and not found[1]:
                    self._device.join(event)
                self._device.share(found[0])
                return found
            if state is State.READY:
                try:
                    result = self._ready(handle)
                except BaseException:
                    self._device.drain()  # see `drop_result`
                    raise
                if result is not None:
                    return result, False
            if state is State.STORED:
                return self._demand(handle, again=again), False
            if state is State.KEPT:
                result = self._as_decoded(handle)
                if result is not None:
                    return result, False
            elif event is not None:
                self._await(handle, event)
            patience = patience or Patience()
            patience.pause(handle.state.value)

    def own_memory(self, handle: Handle) -> torch.Tensor | None:
        """The tensor's own memory, which may be leaving, and goes on doing so; None: it has left.

        Computation that this thread issues from here on may read it.
        """
        with self._lock:
            owner = handle.token()
            source = None if owner is None or handle.must_round_trip else owner.source
        if source is not None:
            self._device.share(source)
        return source

    def _at_hand(self, handle: Handle) -> Memory | None:
        # Under the lock: memory that can be had without waiting.
        owner = handle.token()
        if handle.error is not None:
            raise to_raise(handle.error)
        if owner is None:
            return None
        if handle.state is State.KEPT and owner.source is not None and not handle.must_round_trip:
            return owner.source, True
        if handle.last_result is None or handle.state is State.READY:
            return None
        found = handle.recall()
        return None if found is None else (found, False)

    def _ready(self, handle: Handle) -> torch.Tensor | None:
        # The memory that a handle in state READY was decoded into; None: look again.
        with self._lock:
            if handle.state is not State.READY:
                return None
            owner, ahead = handle.token(), self._ahead.pop(id(handle), None)
            result = ahead.result if ahead is not None else None if owner is None else owner.result
            if result is None or not handle.give(result):
                # Another thread has been given it, and the device keeps no other; or it was written
                # into.
                if owner is not None:
                    owner.result = None
                self._move(handle, State.STORED)
                return None
            if owner is not None:
                owner.result = result
            event = handle.event if ahead is None else ahead.decoded
        if handle.unpacked == 0:
            self._counters.hits.append(handle.prefetched)
        if ahead is not None and ahead.flat is not None:  # goes at the end of this call
            self._device.join(ahead.decoded, ahead.issued)
        if event is not None:
            self._device.join(event)
            if event.error is not None:
                self.drop_result(handle)
                raise to_raise(event.error)
        self._device.share(result)
        return result

    def _forget(self, handle: Handle) -> Ahead | None:
        # Under the lock: let go of decoded memory; of the kind that has to be joined first.
        owner = handle.token()
        if owner is not None and owner.result is not None:
            handle.give(owner.result)
            owner.result = None
        return self._ahead.pop(id(handle), None)

    def _demand(self, handle: Handle, *, again: bool) -> torch.Tensor:
        # Not prefetched: this thread decodes. So may another one at the same time, into memory of
        # its own; nobody waits for the other.
        if handle.unpacked == 0:
            self._counters.hits.append(False)
        owner = handle.token()
        if handle.recomputed and owner is not None and owner.remat is not None:
            result = self._resources.recompute(owner.remat)
        else:
            result = self._fetch(handle)
        decoded = None if self._device.unified else self._device.now()
        with self._lock:
            if handle.state is not State.STORED:  # another thread has brought it back, too
                return result
            if decoded is not None:  # whoever is given it, too, may be another stream
                handle.event = decoded
            handle.remember(result)
            if (again or handle.views > 1) and owner is not None:
                owner.result = result
                self._move(handle, State.READY)
        return result

    def _move(self, handle: Handle, new: State) -> None:
        # Under the lock: to another state, and the bytes that it holds there.
        held = (new in ON_DEVICE) - (handle.state in ON_DEVICE)
        handle.to(new)
        if held:
            self._counters.hold(device=held * handle.raw_nbytes)

    def _await(self, handle: Handle, event: Event) -> None:
        start = time.perf_counter()
        self._resources.over_link.wait(event)
        end = time.perf_counter()
        self._counters.exposed(end - start)
        if self._counters.timeline is not None:
            self._counters.timeline.span("wait", handle.label, start, end)

    def stop(self, handle: Handle) -> None:
        """A handle that is still in its own memory is wanted there: do not move it at all."""
        with self._lock:
            if handle.state is not State.LEAVING:
                return
            handle.to(State.KEPT)
            self._counters.stay("wanted_early", handle.raw_nbytes)
        self._resources.free_stored(handle)

    def drop_result(self, handle: Handle) -> None:
        """Let go of the decoded memory; users of it keep it alive themselves."""
        try:
            with self._lock:
                if handle.state is not State.READY:
                    return
                self._move(handle, State.STORED)
                ahead = self._forget(handle)
            if ahead is not None:
                self._device.join(ahead.decoded, ahead.issued)
        except BaseException:
            self._device.drain()  # a side stream may be writing memory that nobody holds now
            raise

    def release(self, handle: Handle) -> None:
        """Nobody can ask for the handle any more: free all that no job needs. Twice is once."""
        try:
            with self._lock:
                before = handle.state
                if before is not State.RELEASED:
                    self._move(handle, State.RELEASED)
                    if before is State.LEAVING:
                        self._counters.stay("dropped", handle.raw_nbytes)
                owner = handle.token()
                if owner is None:
                    ahead = self._ahead.pop(id(handle), None)
                else:  # tests release tensors that they still hold
                    ahead, owner.source = self._forget(handle), None
            if ahead is not None:
                self._device.join(ahead.decoded, ahead.issued)
        except BaseException:
            self._device.drain()  # see `drop_result`
            raise
        if handle.sections:
            self._resources.free_stored(handle)

    def recount(self) -> None:  # noqa: B027
        """After an interrupt, and a wait for the device: add up again the bytes under way."""

    # ---------------------------------------------------------------- for both

    def _depart(self, handle: Handle, codec: Codec) -> None:
        # Under the lock: the handle's encode is about to begin.
        handle.must_round_trip = not codec.lossless and must_agree(lossy=True)
        handle.to(State.LEAVING)

    def _take_back(self, handle: Handle) -> None:
        # See Note [interrupts]. Jobs that were submitted see that nobody wants them.
        with self._lock:
            if handle.state is State.LEAVING:
                handle.to(State.KEPT)

    def _keep(self, handle: Handle, reason: str, why: object) -> None:
        # The source is still there; so the tensor stays on the device after all.
        if why is not None:
            self._counters.fall_back(reason, why, "such tensors stay on the device")
        with self._lock:
            if handle.state is not State.LEAVING:
                return
            handle.to(State.KEPT)
            self._counters.stay(reason, handle.raw_nbytes)
        self._resources.free_stored(handle)

    def _what_to_check(self, dtype: torch.dtype, codec: Codec) -> Checked:
        # Indices always, where the host's memory is at hand: the checksum of an encoding is cheap.
        if self._resources.verify:
            return "source" if codec.lossless else "payload"
        return "payload" if self._device.unified and dtype in INDICES else ""

    def _allocate(self, handle: Handle) -> tuple[torch.Tensor, torch.Tensor]:
        # Memory to decode into, [n] flat, and for the result, which is that unless gathered.
        dtype = torch_dtype(handle.meta.dtype)
        try:
            out = self._device.allocate((handle.raw_nbytes // dtype.itemsize,), FLAT, dtype=dtype)
            if type(out) is not torch.Tensor:
                raise without_memory(out)
            return out, empty_strided(handle.meta, out.device) if handle.gathered else out
        except RuntimeError as error:  # torch's, for a CPU's memory as well
            raise MemoryError(f"swap-in of {handle.raw_nbytes} bytes: {error}") from None

    def _as_decoded(self, handle: Handle) -> torch.Tensor | None:
        # See Note [lossy and repeatable]. None: another thread has moved the tensor meanwhile.
        source = handle.source
        if source is None:
            return None
        out, result = self._allocate(handle)
        x = handle.elements(source)
        for section in handle.sections:
            codec, mine = section.codec, section.of(x)
            bound = checked_bound(codec, mine.dtype, mine.numel())
            payload = torch.empty(bound, dtype=torch.uint8, device=mine.device)
            key = section.key(self._resources.seed, handle.position, handle.step)
            size = checked_size(
                codec, codec.encode_flat(mine, payload, key=key, stream=None), bound
            )
            codec.decode_flat(payload[:size], section.of(out), stream=None)
        if handle.gathered:
            unflatten_into(out, handle.meta, result)
        handle.remember(result)
        return result
