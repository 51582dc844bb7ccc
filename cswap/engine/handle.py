"""The life of one swapped tensor: its states, and the table of legal moves."""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Final

import torch

from cswap.errors import InternalError

if TYPE_CHECKING:
    from cswap.advisor.advisor import Advice
    from cswap.advisor.site import Site
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


LEGAL: Final[dict[State, frozenset[State]]] = {
    State.KEPT: frozenset({State.ENCODING, State.RELEASED}),
    # KEPT: wanted before it was out, or modified meanwhile, or the codec failed, or no room is left
    State.ENCODING: frozenset({State.IN_FLIGHT, State.KEPT, State.RELEASED}),
    State.IN_FLIGHT: frozenset({State.STORED, State.RELEASED}),
    State.STORED: frozenset({State.FETCHING, State.RELEASED}),
    State.FETCHING: frozenset({State.READY, State.STORED, State.RELEASED}),  # STORED: it failed
    State.READY: frozenset({State.STORED, State.RELEASED}),  # STORED: the decoded copy was dropped
    State.RELEASED: frozenset(),
}


class Handle:
    """One tensor that was saved, and maybe swapped: a region of one storage, at one version.

    Written by the executor, under its lock; others read.

    Attributes:
        meta: layout of the region as it is encoded: flat unless ``gathered``.
        start: elements of the storage before the region.
        gathered: the region has gaps; what is encoded is a dense copy of its elements.
        source: the tensor's own memory, [n] flat (strided if gathered); None once it is let go.
        version: autograd's version of the source when it was saved, see
            Note [modified in place] in packed.py.
        counter: a tensor that counts with the source, which it is until that is let go.
        base: weak reference to the tensor that owns the version counter (see aliases.py).
        whole: whether the region is the whole storage.
        token: weak reference to what its packed views own together.
        storage_key: of its storage, in the alias table.
        position: index of this tensor among those saved in its step.
        step: number of that step.
        raw_nbytes: bytes of the region.
        lossy_ok: whether a lossy codec may take it.
        parts: sections of the region, each encoded by itself; there is one in most.
        unsafe: parts whose own memory is still needed.
        unstored: parts that are not in the store yet.
        event: of the last job submitted for it; None while a fetch is being prepared.
        error: why the stored bytes cannot be used.
        result: decoded memory, [n]; the strided tensor if gathered.
        views: how many packed views refer to it; ``unpacked`` counts how often one was asked for.
        site: where in the model it was saved.
        lane: of its device.
        prefetched: the fetch under way was not asked for by unpack.
        section_bytes: by a plan; None: as the device has it.
        advice: to be told how the swap went; None unless the advisor was asked.
    """

    __slots__ = (
        "_last_result",
        "_last_version",
        "advice",
        "base",
        "counter",
        "error",
        "event",
        "gathered",
        "lane",
        "lossy_ok",
        "meta",
        "parts",
        "position",
        "prefetched",
        "raw_nbytes",
        "result",
        "section_bytes",
        "site",
        "source",
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
        self, source: torch.Tensor, meta: TensorMeta, *, start: int, gathered: bool, version: int
    ) -> None:
        self.state = State.KEPT
        self.source: torch.Tensor | None = source
        self.meta = meta
        self.start = start
        self.gathered = gathered
        self.version = version
        self.raw_nbytes = source.numel() * source.element_size()
        self.position = 0
        self.step = 0
        self.lossy_ok = False
        self.base: weakref.ref[torch.Tensor] | None = None
        self.token: weakref.ref[object] | None = None
        self.storage_key = 0
        self.whole = False
        self.parts: list[Part] = []
        self.unsafe = 0
        self.unstored = 0
        self.event: Event | None = None
        self.error: BaseException | None = None
        self.result: torch.Tensor | None = None
        self.views = 0
        self.unpacked = 0
        self.prefetched = False
        self.site: Site | None = None
        self.section_bytes: int | None = None
        self.advice: Advice | None = None
        self.lane: Lane
        self.counter = source
        self._last_result: weakref.ref[torch.Tensor] | None = None
        self._last_version = 0

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
        counter = self.counter.detach()
        counter.data = torch.empty(0, dtype=counter.dtype, device=counter.device)
        self.source, self.counter = None, counter

    def modified(self) -> bool:
        """Whether the tensor has been modified in place since it was saved."""
        return self.counter._version != self.version  # noqa: SLF001

    def forget(self) -> None:
        """Drop the decoded memory, but remember it for as long as somebody else uses it."""
        if self.result is not None:
            self._last_result = weakref.ref(self.result)
            self._last_version = self.result._version  # noqa: SLF001
            self.result = None

    def recall(self) -> torch.Tensor | None:
        """The decoded memory that was dropped, if it is still there and as it was."""
        found = None if self._last_result is None else self._last_result()
        if found is not None and found._version == self._last_version:  # noqa: SLF001
            return found
        return None


class Token:
    """Owned by the packed views of a handle: when the last of them goes, so does the handle."""

    __slots__ = ("__weakref__", "handle")

    def __init__(self, handle: Handle) -> None:
        self.handle = handle
