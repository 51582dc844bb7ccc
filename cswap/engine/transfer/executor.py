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
result      decoded memory: the caller's. `Results` keeps it while others have yet to ask.

Note [interrupts]
~~~~~~~~~~~~~~~~~
A Ctrl-C can end any statement of the main thread. It goes up to the user. A handle's state is one
attribute, stored by one instruction, after the data that it promises are in place and before the
data that it no longer needs are let go. Sums that are off by one tensor then are added up again by
the engine.

Note [lossy and repeatable]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whether there is room for a tensor is a matter of time. With a lossy codec its values would depend
on that. Where torch is told to be deterministic, and where there are several ranks (ranks.py), a
tensor for which a lossy codec was chosen has the codec's values in any case: if it has stayed, it
is encoded and decoded when it is asked for.

Several threads may compute. Nobody else knows a handle before its tensor has left, or stays, but
for one that leaves after all (`Sender.leave_after_all`). A state changes under `lock`; no codec, no
copy and no wait runs there.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Protocol, TypeAlias

import torch

from cswap.advisor.live_costs import REMAT
from cswap.codecs.base import DEFAULT_KEY, checked_bound, checked_size, part_key
from cswap.codecs.layout import empty_strided, unflatten_into
from cswap.engine.transfer.handle import State
from cswap.engine.transfer.resources import flat_memory
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


class WayRecipe(Protocol):
    """The part of a `Recipe` that an executor asks for.

    Attributes:
        sizes: of the tensor.
        strides: of the tensor.
        contiguous: whether a new tensor of these sizes has the same strides.
        dtype: of the tensor.
    """

    sizes: torch.Size
    strides: tuple[int, ...]
    contiguous: bool
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
        in_line: encodes tensors; None: there is a link.
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
        self, token: Owner, x: torch.Tensor, codec: Codec, place: WayPlace | None = None
    ) -> None:
        """Encode a kept tensor and move it to the store; over a link, that is issued.

        Args:
            token: of the tensor, which was not modified since it was saved.
            x: its elements, [n] flat: the source itself, or a dense copy if gathered.
            codec: to encode with; must support the dtype.
            place: where in the step; None: at none.
        """

    @abc.abstractmethod
    def _fetch(self, token: Owner, *, expected: bool) -> Memory:
        """Bring a stored tensor back for the computation of this thread.

        Raises:
            CorruptEncodingError: the stored bytes were damaged.
            MemoryError: no memory to decode into.
        """

    def recompute_later(self, token: Owner) -> None:
        """Let go of a kept tensor's memory: its token knows how to compute it again."""
        handle, nbytes = token.handle, token.handle.raw_nbytes
        with self._lock:
            if handle.state is not State.KEPT:
                return
            handle.recomputed = True
            handle.to(State.STORED)
            handle.let_go()
        self._counters.moves.append((-nbytes, 0, 0, REMAT, nbytes, 0, 0.0))

    def memory(self, token: Owner, *, expected: bool = True) -> Memory:
        """The tensor's memory: its own if still held, else decoded.

        Computation that this thread issues from here on may read it.

        Args:
            token: of the tensor.
            expected: whether backward asks: see `Link.bring`.

        Raises:
            CorruptEncodingError: the stored bytes were damaged.
            MemoryError: no memory to decode into.
        """
        handle, source = token.handle, token.source
        if handle.error is not None:
            raise to_raise(handle.error)
        if source is not None:
            if handle.must_round_trip:
                return self._as_decoded(handle, source), False
            self._device.share(source)
            return source, True
        return self._fetch(token, expected=expected)

    def release(self, handle: Handle) -> None:
        """Nobody can ask for the handle any more: free all that nothing needs. Twice is once."""
        with self._lock:
            before, token = handle.state, handle.token()
            if before is not State.RELEASED:
                handle.to(State.RELEASED)
                if before is State.KEPT:
                    self._counters.hold(device=-handle.raw_nbytes)
            if token is not None:  # tests release tensors that they still hold
                token.source = token.result = token.stored = None

    def check(self) -> None:  # noqa: B027
        """Raise damage that the device has met, before memory that was decoded is given on."""

    def recount(self) -> None:  # noqa: B027
        """After an interrupt, and a wait for the device: add up again the bytes under way."""

    # ---------------------------------------------------------------- for both

    def _decide(self, handle: Handle, codec: Codec, cuts: tuple[Cut, ...]) -> None:
        # Before an encode. cuts: the parts that are encoded by themselves.
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
        self._counters.stay(reason, handle.raw_nbytes)

    @staticmethod
    def _in_layout(handle: Handle, flat: torch.Tensor) -> torch.Tensor:
        # The tensor of a gathered handle; of any other, the memory itself.
        if not handle.gathered:
            return flat
        try:
            return unflatten_into(flat, handle.meta, empty_strided(handle.meta, flat.device))
        except RuntimeError as error:
            raise MemoryError(f"swap-in of {handle.raw_nbytes} bytes: {error}") from None

    def _as_decoded(self, handle: Handle, source: torch.Tensor) -> torch.Tensor:
        # See Note [lossy and repeatable].
        codec, x = handle.codec, handle.elements(source)
        assert codec is not None  # a lossy one was chosen
        out = flat_memory(self._device, x.dtype, x.numel())
        for index, (start, numel, _) in enumerate(handle.cuts):
            mine, bound = x[start : start + numel], checked_bound(codec, x.dtype, numel)
            payload = torch.empty(bound, dtype=torch.uint8, device=x.device)
            key = self._key(handle, codec, index)
            size = checked_size(
                codec, codec.encode_flat(mine, payload, key=key, stream=None), bound
            )
            codec.decode_flat(payload[:size], out[start : start + numel], stream=None)
        return self._in_layout(handle, out)
