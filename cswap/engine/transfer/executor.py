"""The swapping executor: moves one handle out and back.

There are two kinds. Where host memory is the device's own (a CPU), a swap-out is an encode into it
and a swap-in a decode from it, each by the thread that asks (host_executor.py). Where there is a
link, a region of it holds the tensor (link_executor.py, engine/link/).

Note [owners of memory]
~~~~~~~~~~~~~~~~~~~~~~~
source      the tensor's own memory: its owner's, until it has been encoded, or until the last
            packed view goes; over a link a region's, from the moment at which its way is issued.
host, file  the store's copy: from the end of its encode until release; autograd may ask again
            (retain_graph), so a fetch does not give it up.
result      decoded memory: the caller's. Kept only while another packed view has yet to be asked
            for.

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

Several threads may compute. A state changes under `lock`; no codec, no copy and no wait runs there.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from cswap.advisor.live_costs import REMAT
from cswap.codecs.base import DEFAULT_KEY, checked_bound, checked_size, part_key
from cswap.codecs.layout import empty_strided, torch_dtype, unflatten_into
from cswap.devices.base import FLAT, without_memory
from cswap.engine.transfer.handle import ON_DEVICE, State
from cswap.engine.transfer.in_line import Shape
from cswap.engine.transfer.resources import Patience
from cswap.errors import to_raise
from cswap.ranks import must_agree

if TYPE_CHECKING:
    from cswap.codecs.base import Codec, EncodeKey
    from cswap.engine.link.link import Link
    from cswap.engine.link.link_way import LinkWay
    from cswap.engine.transfer.handle import Cut, Handle, Owner
    from cswap.engine.transfer.in_line import InLine
    from cswap.engine.transfer.resources import Resources


Memory: TypeAlias = tuple[torch.Tensor, bool]
"""Where the values of a handle can be read: memory with any layout, and whether that is the memory
that the tensor was saved from."""


class WayRecipe(Shape, Protocol):
    """The part of a `Recipe` that an executor asks for. Attributes: dtype: of the tensor."""

    dtype: torch.dtype


class WayPlace(Protocol):
    """The part of a `Place` that an executor asks for.

    Attributes:
        way: over a link, of the last tensor; None: that took none.
    """

    way: LinkWay | None

    @property
    def recipe(self) -> WayRecipe:
        """Of the tensor."""
        ...


class Executor(abc.ABC):
    """Runs swap-out and swap-in on one device.

    Attributes:
        in_line: encodes tensors without handles; None: there is a link.
        link: brings tensors over it; None: there is none.
    """

    in_line: InLine | None = None
    link: Link | None = None

    def __init__(self, resources: Resources) -> None:
        """Args: resources: of the device."""
        self._resources = resources
        self._device = resources.device
        self._lock = resources.lock
        self._counters = resources.counters

    @abc.abstractmethod
    def swap_out(
        self, handle: Handle, x: torch.Tensor, codec: Codec, place: WayPlace | None = None
    ) -> None:
        """Encode a kept handle and move it to the store; over a link, that is issued.

        Args:
            handle: kept, and not modified since it was saved.
            x: its elements, [n] flat: the source itself, or a dense copy if gathered.
            codec: to encode with; must support the dtype.
            place: where in the step; None: at none.
        """

    @abc.abstractmethod
    def _fetch(self, handle: Handle, *, expected: bool) -> Memory:
        """Bring a stored handle back for the computation of this thread.

        Raises:
            CorruptEncodingError: the stored bytes were damaged.
            MemoryError: no memory to decode into.
        """

    @abc.abstractmethod
    def settle(self, handle: Handle) -> None:
        """Block until nothing is under way for the handle."""

    def recompute_later(self, handle: Handle) -> None:
        """Let go of a kept handle's memory: its owner knows how to compute it again."""
        with self._lock:
            if handle.state is not State.KEPT:
                return
            handle.recomputed = True
            handle.to(State.STORED)
            handle.let_go()
        self._counters.swapped_out(REMAT, handle.raw_nbytes, 0, 0.0, device=-handle.raw_nbytes)

    def memory(self, handle: Handle, *, again: bool = False, expected: bool = True) -> Memory:
        """The tensor's memory: its own if still held, else decoded, or computed again.

        Computation that this thread issues from here on may read it.

        Args:
            handle: the handle.
            again: it will be asked for once more soon.
            expected: whether backward asks: see `Link.bring`.

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
            if state is State.STORED:
                return self._demand(handle, again=again, expected=expected)
            if state is State.KEPT:
                result = self._as_decoded(handle)
                if result is not None:
                    return result, False
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
        if handle.state is State.READY and (owner.result is None or not handle.give(owner.result)):
            self._forget(handle, owner)  # a user has written into it
        found = handle.recall()
        return None if found is None else (found, False)

    def _forget(self, handle: Handle, owner: Owner) -> None:
        # Under the lock: let go of decoded memory.
        owner.result = None
        handle.to(State.STORED)
        self._counters.hold(device=-handle.raw_nbytes)

    def _demand(self, handle: Handle, *, again: bool, expected: bool) -> Memory:
        # This thread decodes. So may another one at the same time, into memory of its own; nobody
        # waits for the other.
        owner = handle.token()
        if handle.recomputed and owner is not None and owner.remat is not None:
            if handle.unpacked == 0:
                self._counters.hits.append(False)
            result, own = self._resources.recompute(owner.remat), False
        else:
            result, own = self._fetch(handle, expected=expected)
        if own:
            return result, True
        decoded = self._device.now()
        with self._lock:
            if handle.state is not State.STORED:  # another thread has brought it back, too
                return result, False
            handle.event = decoded  # whoever is given it, too, may be another stream
            handle.remember(result)
            if (again or handle.views > 1) and owner is not None:
                owner.result = result
                handle.to(State.READY)
                self._counters.hold(device=handle.raw_nbytes)
        return result, False

    def stop(self, handle: Handle) -> None:
        """A handle that is still in its own memory is wanted there: do not move it at all."""
        with self._lock:
            if handle.state is not State.LEAVING:
                return
            handle.to(State.KEPT)
            self._counters.stay("wanted_early", handle.raw_nbytes)

    def drop_result(self, handle: Handle) -> None:
        """Let go of the decoded memory; users of it keep it alive themselves."""
        with self._lock:
            owner = handle.token()
            if handle.state is State.READY and owner is not None:
                self._forget(handle, owner)

    def release(self, handle: Handle) -> None:
        """Nobody can ask for the handle any more: free all that nothing needs. Twice is once."""
        with self._lock:
            before, owner = handle.state, handle.token()
            if before is not State.RELEASED:
                handle.to(State.RELEASED)
                if before in ON_DEVICE:
                    self._counters.hold(device=-handle.raw_nbytes)
            if owner is not None:  # tests release tensors that they still hold
                owner.source = owner.result = owner.passage = None
        self._resources.free_stored(handle)

    def recount(self) -> None:  # noqa: B027
        """After an interrupt, and a wait for the device: add up again the bytes under way."""

    # ---------------------------------------------------------------- for both

    def _decide(self, handle: Handle, codec: Codec, cuts: tuple[Cut, ...]) -> None:
        # Before an encode. cuts: the parts that are encoded by themselves.
        with self._lock:
            handle.codec, handle.cuts = codec, cuts
            handle.must_round_trip = not codec.lossless and must_agree(lossy=True)

    def _key(self, handle: Handle, codec: Codec, index: int = 0) -> EncodeKey:
        # Of the encode of a part of a tensor.
        if codec.lossless:
            return DEFAULT_KEY
        return part_key(self._resources.seed, handle.position, index, handle.step)

    def _keep(self, handle: Handle, reason: str, why: object) -> None:
        # The source is still there; so the tensor stays on the device after all.
        if why is not None:
            self._counters.fall_back(reason, why, "such tensors stay on the device")
        with self._lock:
            if handle.state is State.LEAVING:
                handle.to(State.KEPT)
            if handle.state is State.KEPT:
                self._counters.stay(reason, handle.raw_nbytes)

    def _flat(self, handle: Handle) -> torch.Tensor:
        # [n] flat memory to decode into.
        dtype = torch_dtype(handle.meta.dtype)
        try:
            out = self._device.allocate((handle.raw_nbytes // dtype.itemsize,), FLAT, dtype=dtype)
        except RuntimeError as error:  # torch's, for a CPU's memory as well
            raise no_memory(handle, error) from None
        if type(out) is not torch.Tensor:
            raise without_memory(out)
        return out

    @staticmethod
    def _in_layout(handle: Handle, flat: torch.Tensor) -> torch.Tensor:
        # The tensor of a gathered handle; of any other, the memory itself.
        if not handle.gathered:
            return flat
        try:
            return unflatten_into(flat, handle.meta, empty_strided(handle.meta, flat.device))
        except RuntimeError as error:
            raise no_memory(handle, error) from None

    def _as_decoded(self, handle: Handle) -> torch.Tensor | None:
        # See Note [lossy and repeatable]. None: another thread has moved the tensor meanwhile.
        source, codec = handle.source, handle.codec
        if source is None or codec is None:
            return None
        out, x = self._flat(handle), handle.elements(source)
        for index, (start, numel, _) in enumerate(handle.cuts):
            mine, bound = x[start : start + numel], checked_bound(codec, x.dtype, numel)
            payload = torch.empty(bound, dtype=torch.uint8, device=x.device)
            key = self._key(handle, codec, index)
            size = checked_size(
                codec, codec.encode_flat(mine, payload, key=key, stream=None), bound
            )
            codec.decode_flat(payload[:size], out[start : start + numel], stream=None)
        result = self._in_layout(handle, out)
        handle.remember(result)
        return result


def no_memory(handle: Handle, error: RuntimeError) -> MemoryError:
    """The error for a tensor that cannot come back."""
    return MemoryError(f"swap-in of {handle.raw_nbytes} bytes: {error}")
