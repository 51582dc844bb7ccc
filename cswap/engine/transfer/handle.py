"""The life of one swapped tensor: its states, and the table of legal moves."""

from __future__ import annotations

import enum
from typing import TYPE_CHECKING, Any, Final, Protocol, TypeAlias

import torch

from cswap.codecs.layout import flatten
from cswap.codecs.tolerance import EXACT
from cswap.errors import InternalError
from cswap.stats.step_trace import SavedTensor

if TYPE_CHECKING:
    import weakref
    from collections.abc import Callable

    from cswap.advisor.call_site import Site
    from cswap.codecs.base import Codec
    from cswap.engine.order.plan_follower import Planned
    from cswap.engine.saved.outer import Outer
    from cswap.engine.transfer.notes import Notes
    from cswap.remat.record import Remat
    from cswap.schema.tensor import TensorMeta


class State(enum.Enum):
    """Where a tensor's bytes are. The only place that names these states."""

    KEPT = "kept"  # in its own memory, held by us
    STORED = "stored"  # encoded, or computed again; its own memory has been let go
    RELEASED = "released"  # nobody can ask for it any more

    __hash__ = object.__hash__  # Enum's own is Python code, and the table is asked often


LEGAL: Final[dict[State, frozenset[State]]] = {
    State.KEPT: frozenset({State.STORED, State.RELEASED}),
    State.STORED: frozenset({State.RELEASED}),
    State.RELEASED: frozenset(),
}

Cut: TypeAlias = tuple[int, int, int]
"""Start and elements of a part of a tensor, and the bound of its encoding in bytes."""


class Owner(Protocol):
    """Owned by the packed views of a handle: `cswap.engine.saved.packed.Token`, which says more.

    Attributes:
        handle: its accounts.
        lane: of its device.
        source: the tensor's own memory, with any layout; None: it was let go.
        result: decoded memory that waits.
        stored: the way that it has left.
        remat: how it can be computed again, if it can.
        uses: how often it was asked for.
    """

    handle: Handle
    lane: Any
    source: torch.Tensor | None
    result: torch.Tensor | None
    stored: Any
    remat: Remat | None
    uses: int


class Handle:
    """One tensor that was saved, and maybe swapped: a region of one storage, at one version.

    It keeps the accounts. The tensors themselves are its token's, so that they are freed when the
    last packed view goes, whoever still knows the handle.

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
        token: weak reference to its token.
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
        error: why the stored bytes cannot be used.
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
        "advice",
        "aligned",
        "base",
        "codec",
        "cuts",
        "error",
        "gathered",
        "is_cast",
        "is_older",
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
        "token",
        "tolerance",
        "version",
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
        self.position = self.step = self.storage_key = 0
        self.place = 0, 0, -1
        self.tolerance = EXACT
        self.must_round_trip = self.whole = False
        self.pinned = ""
        self.recomputed = self.aligned = self.is_cast = self.is_older = False
        self.base: weakref.ref[torch.Tensor] | None = None
        self.codec: Codec | None = None
        self.cuts: tuple[Cut, ...] = ()
        self.error: BaseException | None = None
        self.site: Site | None = None
        self.planned: Planned | None = None
        self.advice: Notes | None = None
        self.outer: Outer | None = None
        self._counter: torch.Tensor | None = None

    @property
    def source(self) -> torch.Tensor | None:
        """The tensor's own memory, with any layout; None: it was let go."""
        token = self.token()
        return None if token is None else token.source

    def elements(self, source: torch.Tensor) -> torch.Tensor:
        """The elements of the region, [n] flat; a dense copy if gathered.

        Args:
            source: the token's.
        """
        if self.gathered:
            return flatten(source)
        return source.as_strided(self.meta.sizes, (1,), self.start)

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
        """Bytes of device memory that it holds; those of its region are the link's."""
        return self.raw_nbytes if self.state is State.KEPT else 0

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
