"""The life of one swapped tensor: its states, and the table of legal moves."""

from __future__ import annotations

import enum
import weakref
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import torch

from cswap.codecs.layout import flatten
from cswap.codecs.tolerance import EXACT
from cswap.errors import InternalError
from cswap.stats.step_trace import SavedTensor

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.advisor.call_site import Site
    from cswap.codecs.base import Codec
    from cswap.engine.link.passage import Passage
    from cswap.engine.order.plan_follower import Planned
    from cswap.engine.saved.outer import Outer
    from cswap.engine.transfer.notes import Notes
    from cswap.engine.transfer.stored import Stored
    from cswap.remat.record import Remat
    from cswap.schema.tensor import TensorMeta


class State(enum.Enum):
    """Where a tensor's bytes are. The only place that names these states."""

    KEPT = "kept"  # in its own memory, held by us
    LEAVING = "leaving"  # a CPU's thread encodes it; still in its own memory
    STORED = "stored"  # encoded; its own memory has been let go
    READY = "ready"  # decoded, and still stored
    RELEASED = "released"  # nobody can ask for it any more

    __hash__ = object.__hash__  # Enum's own is Python code, and the table is asked often


ON_DEVICE: Final = frozenset({State.KEPT, State.LEAVING, State.READY})
"""States in which the tensor's raw bytes are in the device's memory."""

LEGAL: Final[dict[State, frozenset[State]]] = {
    # STORED: its way over a link has been issued; or it is computed again when it is asked for.
    State.KEPT: frozenset({State.LEAVING, State.STORED, State.RELEASED}),
    # KEPT: wanted before it was out, modified meanwhile, the codec failed, or no room is left.
    State.LEAVING: frozenset({State.STORED, State.KEPT, State.RELEASED}),
    State.STORED: frozenset({State.READY, State.RELEASED}),
    State.READY: frozenset({State.STORED, State.RELEASED}),  # STORED: the decoded copy was dropped
    State.RELEASED: frozenset(),
}

Cut: TypeAlias = tuple[int, int, int]
"""Start and elements of a part of a tensor, and the bound of its encoding in bytes."""


class Owner(Protocol):
    """Owned by the packed views of a handle; owns the tensors, so these go with the last view.

    Attributes:
        source: the tensor's own memory, with any layout; `Handle.elements` makes it flat. None once
            it is let go.
        result: decoded memory, [n] flat; the strided tensor if gathered or computed again. None
            unless it waits for another packed view to be asked for.
        remat: how it can be computed again, if it can.
        passage: over a link; None: it has taken none.
        lane: of its device.
    """

    source: torch.Tensor | None
    result: torch.Tensor | None
    remat: Remat | None
    passage: Passage | None
    lane: Any


class Handle:
    """One tensor that was saved, and maybe swapped: a region of one storage, at one version.

    Written by the executor, under its lock; others read. It keeps the accounts. The tensors
    themselves are its owner's, so that they are freed when the last packed view goes, whoever
    still knows the handle.

    Attributes:
        meta: layout of the region as it is encoded: flat unless ``gathered``.
        start: elements of the storage before the region.
        gathered: the region has gaps; its encoding is that of a dense copy of its elements.
        version: autograd's version of the source when it was saved, see
            Note [modified in place] in packed.py.
        base: weak reference to the tensor that owns the version counter (see aliases.py).
        whole: whether the region is the whole storage.
        aligned: whether the region begins at an address at which new memory may begin.
        pinned: why it is never to leave its own memory, a name in `cswap.stats.keep_reasons` or
            `LEFT_OUT`; empty: it may.
        token: weak reference to its owner.
        storage_key: of its storage, in the alias table.
        position: index of this tensor among those saved in its step.
        place: thread, call of the model since the last backward, and number among the tensors that
            are saved there, whether or not they stay.
        step: number of that step.
        raw_nbytes: bytes of the region.
        tolerance: for errors; of its encoding, if there is one (cswap/codecs/tolerance.py).
        must_round_trip: its values are to be those that its codec gives back, even if it stays (see
            Note [lossy and repeatable] in executor.py).
        codec: that was chosen for it; None: none was.
        cuts: the parts in which it is encoded; there is one in most.
        stored: its encoding, where host memory is the device's own.
        event: at which the decoded memory holds the values; None: it does.
        error: why the stored bytes cannot be used.
        views: how many packed views refer to it; ``unpacked`` counts how often one was asked for.
        took_s: seconds in the hooks so far, in which it left and came back.
        site: where in the model it was saved.
        recomputed: it is computed again rather than stored.
        is_older: its memory may have been written since: it serves no other tensor.
        is_cast: it is a copy of a parameter in another dtype: computed again, or it stays.
        planned: by a plan; None: there is none for this tensor.
        advice: to be told how the swap went; None unless somebody was asked.
        outer: of which the tensor is a part (saved/apart.py); None: of nothing.
    """

    __slots__ = (
        "_counter",
        "_last_version",
        "advice",
        "aligned",
        "base",
        "codec",
        "cuts",
        "error",
        "event",
        "gathered",
        "is_cast",
        "is_older",
        "last_result",
        "meta",
        "must_round_trip",
        "outer",
        "pinned",
        "place",
        "planned",
        "position",
        "raw_nbytes",
        "recomputed",
        "site",
        "start",
        "state",
        "step",
        "storage_key",
        "stored",
        "token",
        "tolerance",
        "took_s",
        "unpacked",
        "version",
        "views",
        "whole",
    )

    token: Callable[[], Owner | None]

    def __init__(
        self, meta: TensorMeta, *, start: int, gathered: bool, version: int, raw_nbytes: int
    ) -> None:
        self.state = State.KEPT
        self.meta = meta
        self.start = start
        self.gathered = gathered
        self.version = version
        self.raw_nbytes = raw_nbytes
        self.position = self.step = self.storage_key = self.views = self.unpacked = 0
        self.place = 0, 0, -1
        self.tolerance = EXACT
        self.must_round_trip = self.whole = False
        self.pinned = ""
        self.recomputed = self.aligned = self.is_cast = self.is_older = False
        self.took_s = 0.0
        self.base: weakref.ref[torch.Tensor] | None = None
        self.codec: Codec | None = None
        self.cuts: tuple[Cut, ...] = ()
        self.stored: Stored | None = None
        self.event: Any = None
        self.error: BaseException | None = None
        self.site: Site | None = None
        self.planned: Planned | None = None
        self.advice: Notes | None = None
        self.outer: Outer | None = None
        self._counter: torch.Tensor | None = None
        self.last_result: weakref.ref[torch.Tensor] | None = None
        self._last_version = 0

    @property
    def source(self) -> torch.Tensor | None:
        """See `Owner`."""
        token = self.token()
        return None if token is None else token.source

    def elements(self, source: torch.Tensor) -> torch.Tensor:
        """The elements of the region, [n] flat; a dense copy if gathered.

        Args:
            source: the owner's.
        """
        if self.gathered:
            return flatten(source)
        return source.as_strided(self.meta.sizes, (1,), self.start)

    @property
    def counter(self) -> torch.Tensor | None:
        """A tensor that counts versions with the source; None if nobody can ask any more."""
        return self._counter if self._counter is not None else self.source

    @property
    def alive(self) -> bool:
        """Whether somebody can still ask for it."""
        return self.token() is not None

    @property
    def label(self) -> SavedTensor:
        """Its name on a timeline."""
        site = self.site
        where = "" if site is None else site.scope or site.operator or site.producer
        return SavedTensor(self.position, self.step, where)

    @property
    def device_bytes(self) -> int:
        """Bytes of device memory that it holds; those of its region are the link's."""
        return self.raw_nbytes if self.state in ON_DEVICE else 0

    @property
    def host_bytes(self) -> int:
        """Bytes of host memory that hold its encoding; those of its region are the link's."""
        stored = self.stored
        return 0 if stored is None or stored.host is None else stored.host.numel()

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
        self._counter = version_counter(token.source)
        token.source = None

    def modified(self) -> bool:
        """Whether the tensor has been modified in place since it was saved."""
        counter = self._counter
        if counter is None:
            token = self.token()
            counter = None if token is None else token.source
        return counter is not None and counter._version != self.version  # noqa: SLF001

    def remember(self, result: torch.Tensor) -> None:
        """Know decoded memory for as long as somebody else uses it."""
        self.last_result = weakref.ref(result)
        self._last_version = result._version  # noqa: SLF001

    def give(self, result: torch.Tensor) -> bool:
        """Note that decoded memory is given to a user, as it may have been to another before.

        Args:
            result: the memory.

        Returns:
            Whether no user has written into it. Autograd refuses a saved tensor that was modified;
            here the next user gets other memory, decoded once more.
        """
        if self.last_result is not None and self.last_result() is result:
            return result._version == self._last_version  # noqa: SLF001
        self.remember(result)
        return True

    def recall(self) -> torch.Tensor | None:
        """The decoded memory that was given out last, if it is still there and as it was."""
        found = None if self.last_result is None else self.last_result()
        if found is not None and found._version == self._last_version:  # noqa: SLF001
            return found
        return None


def version_counter(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor without elements that counts versions with this one, and keeps no memory."""
    counter = tensor.detach()
    counter.data = nothing_of(counter.dtype, counter.device)
    return counter


def nothing_of(dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A tensor of no elements; one serves all, since nobody writes it."""
    found = _NOTHING.get((dtype, device))
    if found is None:
        found = _NOTHING[dtype, device] = torch.empty(0, dtype=dtype, device=device)
    return found


_NOTHING: Final[dict[tuple[torch.dtype, torch.device], torch.Tensor]] = {}
