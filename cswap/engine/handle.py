"""The life of one swapped tensor: its states, and the table of legal moves."""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Final

import torch

from cswap.errors import InternalError
from cswap.stats.step_trace import SavedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.advisor.advisor import Advice
    from cswap.advisor.call_site import Site
    from cswap.devices.base import Event
    from cswap.engine.lanes import Lane
    from cswap.engine.part import Part
    from cswap.schema.tensor import TensorMeta


class State(enum.Enum):
    """Where a tensor's bytes are. The only place that names these states."""

    KEPT = "kept"  # in its own memory, held by us
    ENCODING = "encoding"  # encodes have been submitted; still in its own memory
    IN_FLIGHT = "in flight"  # encoded; the encodings are on their way to the store
    STORED = "stored"  # in the store only
    FETCHING = "fetching"  # a decode has been submitted
    READY = "ready"  # decoded, and still in the store
    RELEASED = "released"  # nobody can ask for it any more

    __hash__ = object.__hash__  # Enum's own is Python code, and the table is asked often


ON_DEVICE: Final = frozenset({State.KEPT, State.ENCODING, State.FETCHING, State.READY})
"""States in which the tensor's raw bytes are in the device's memory."""

LEGAL: Final[dict[State, frozenset[State]]] = {
    State.KEPT: frozenset({State.ENCODING, State.RELEASED}),
    # KEPT: wanted before it was out, modified meanwhile, the codec failed, or no room is left.
    # STORED: where host memory is the device's own, one job encodes and stores.
    State.ENCODING: frozenset({State.IN_FLIGHT, State.STORED, State.KEPT, State.RELEASED}),
    State.IN_FLIGHT: frozenset({State.STORED, State.RELEASED}),
    State.STORED: frozenset({State.FETCHING, State.RELEASED}),
    State.FETCHING: frozenset({State.READY, State.STORED, State.RELEASED}),  # STORED: it failed
    State.READY: frozenset({State.STORED, State.RELEASED}),  # STORED: the decoded copy was dropped
    State.RELEASED: frozenset(),
}


class Handle:
    """One tensor that was saved, and maybe swapped: a region of one storage, at one version.

    Written by the executor, under its lock; others read. It keeps the accounts. The tensors
    themselves are the token's, so that they are freed when the last packed view goes, whoever
    still knows the handle.

    Attributes:
        meta: layout of the region as it is encoded: flat unless ``gathered``.
        start: elements of the storage before the region.
        gathered: the region has gaps; its encoding is that of a dense copy of its elements.
        version: autograd's version of the source when it was saved, see
            Note [modified in place] in packed.py.
        base: weak reference to the tensor that owns the version counter (see aliases.py).
        whole: whether the region is the whole storage.
        pinned: it is never to leave its own memory (see aliases.py).
        token: weak reference to the token that its packed views own together.
        storage_key: of its storage, in the alias table.
        position: index of this tensor among those saved in its step.
        step: number of that step.
        raw_nbytes: bytes of the region.
        lossy_ok: whether a lossy codec may take it.
        must_round_trip: its values are to be those that its codec gives back, even if it stays (see
            Note [lossy and repeatable] in executor.py).
        parts: sections of the region, each encoded by itself; there is one in most.
        unsafe: parts whose own memory is still needed.
        unstored: parts that are not in the store yet.
        event: of the last job submitted for it; None while a fetch is being prepared.
        error: why the stored bytes cannot be used.
        views: how many packed views refer to it; ``unpacked`` counts how often one was asked for.
        site: where in the model it was saved.
        lane: of its device.
        prefetched: the fetch under way was not asked for by unpack.
        section_bytes: by a plan; None: as the device has it.
        advice: to be told how the swap went; None unless the advisor was asked.
    """

    __slots__ = (
        "_counter",
        "_last_result",
        "_last_version",
        "advice",
        "base",
        "error",
        "event",
        "gathered",
        "lane",
        "lossy_ok",
        "meta",
        "must_round_trip",
        "parts",
        "pinned",
        "position",
        "prefetched",
        "raw_nbytes",
        "section_bytes",
        "site",
        "start",
        "state",
        "step",
        "storage_key",
        "token",
        "unpacked",
        "unsafe",
        "unstored",
        "version",
        "views",
        "whole",
    )

    def __init__(
        self, meta: TensorMeta, *, start: int, gathered: bool, version: int, raw_nbytes: int
    ) -> None:
        self.state = State.KEPT
        self.meta = meta
        self.start = start
        self.gathered = gathered
        self.version = version
        self.raw_nbytes = raw_nbytes
        self.position = 0
        self.step = 0
        self.lossy_ok = False
        self.must_round_trip = False
        self.base: weakref.ref[torch.Tensor] | None = None
        self.token: weakref.ref[Token]
        self.storage_key = 0
        self.whole = False
        self.pinned = False
        self.parts: list[Part] = []
        self.unsafe = 0
        self.unstored = 0
        self.event: Event | None = None
        self.error: BaseException | None = None
        self.views = 0
        self.unpacked = 0
        self.prefetched = False
        self.site: Site | None = None
        self.section_bytes: int | None = None
        self.advice: Advice | None = None
        self.lane: Lane
        self._counter: torch.Tensor | None = None
        self._last_result: weakref.ref[torch.Tensor] | None = None
        self._last_version = 0

    @property
    def source(self) -> torch.Tensor | None:
        """The tensor's own memory, [n] flat (strided if gathered); None once it is let go."""
        token = self.token()
        return None if token is None else token.source

    @property
    def result(self) -> torch.Tensor | None:
        """Decoded memory, [n]; the strided tensor if gathered."""
        token = self.token()
        return None if token is None else token.result

    @result.setter
    def result(self, value: torch.Tensor | None) -> None:
        token = self.token()
        if token is not None:
            token.result = value

    @property
    def counter(self) -> torch.Tensor | None:
        """A tensor that counts versions with the source; None if nobody can ask any more."""
        return self._counter if self._counter is not None else self.source

    @property
    def label(self) -> SavedTensor:
        """Its name on a timeline."""
        site = self.site
        where = "" if site is None else site.scope or site.operator or site.producer
        return SavedTensor(self.position, self.step, where)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that it holds."""
        return self.raw_nbytes if self.state in ON_DEVICE else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold its encodings."""
        return sum(part.host.numel() for part in self.parts if part.host is not None)

    @property
    def alive(self) -> bool:
        """Whether somebody can still ask for it."""
        return self.token() is not None

    def to(self, new: State) -> None:
        """Move to state ``new``.

        Raises:
            InternalError: the table does not allow it.
        """
        if new not in LEGAL[self.state]:
            raise InternalError(f"handle: {self.state.value} -> {new.value} is not legal")
        self.state = new

    def let_go(self) -> None:
        """Give up the tensor's own memory, but not its version counter."""
        token = self.token()
        if token is None or token.source is None:
            return
        counter = token.source.detach()
        counter.data = torch.empty(0, dtype=counter.dtype, device=counter.device)
        self._counter = counter
        token.source = None

    def modified(self) -> bool:
        """Whether the tensor has been modified in place since it was saved."""
        counter = self.counter
        return counter is not None and counter._version != self.version  # noqa: SLF001

    def forget(self) -> None:
        """Drop the decoded memory, but remember it for as long as somebody else uses it."""
        result = self.result
        if result is not None:
            self.remember(result)
            self.result = None

    def remember(self, result: torch.Tensor) -> None:
        """Know decoded memory for as long as somebody else uses it."""
        self._last_result = weakref.ref(result)
        self._last_version = result._version  # noqa: SLF001

    def recall(self) -> torch.Tensor | None:
        """The decoded memory that was dropped, if it is still there and as it was."""
        found = None if self._last_result is None else self._last_result()
        if found is not None and found._version == self._last_version:  # noqa: SLF001
            return found
        return None


class Token:
    """Owned by the packed views of a handle; owns the tensors, so these go with the last view.

    Attributes:
        handle: its accounts.
        source: see `Handle.source`.
        result: see `Handle.result`.
    """

    __slots__ = ("__weakref__", "handle", "result", "source")

    def __init__(self, handle: Handle, source: torch.Tensor) -> None:
        self.handle = handle
        self.source: torch.Tensor | None = source
        self.result: torch.Tensor | None = None
        handle.token = weakref.ref(self)


class Death(weakref.ref[Token]):
    """A weak reference to a token that is put on a list when the token dies.

    Its callback is the list's ``append``. No Python code runs where the token dies, which may be
    anywhere: under our locks, and where an interrupt would be swallowed.

    Attributes:
        handle: of the token.
    """

    __slots__ = ("handle",)

    handle: Handle

    @staticmethod
    def of(token: Token, callback: Callable[[weakref.ref[Token]], None]) -> None:
        """Make the reference, and let the handle own it."""
        death = Death(token, callback)
        death.handle = token.handle
        token.handle.token = death
