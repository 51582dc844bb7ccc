"""Records of a step, as a goal sees it."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    import weakref

    from cswap.engine.saved.packed import Kept, PackedView
    from cswap.fit.problem import Key

WEIGHT: Final = 0.5
"""Weight of the newest measurement."""


@dataclass(slots=True)
class WayNotes:
    """Measured outcome of one way at one call site; see `cswap.engine.transfer.notes.Notes`.

    Attributes:
        nbytes: of the last encoding.
        device_s: seconds of encode and decode, a moving average; 0.0: not measured.
        learns: always.
    """

    codec: str
    nbytes: int = 0
    device_s: float = 0.0
    learns: bool = True

    def note_encoded(self, codec: str, raw_nbytes: int, nbytes: int) -> None:
        """See `Notes`."""
        self.nbytes = nbytes if codec == self.codec else raw_nbytes

    def note_round_trip(self, codec: str, device_s: float) -> None:
        """See `Notes`."""
        if codec == self.codec:
            before = self.device_s or device_s
            self.device_s = before + WEIGHT * (device_s - before)


@dataclass(frozen=True, slots=True)
class SeenFormula:
    """How a tensor can be computed again.

    Attributes:
        inputs: the first save of each of its inputs, and the number of operators in a row from that
            input to the tensor.
        depth, product: see `cswap.fit.problem.Saved`.
    """

    inputs: tuple[tuple[Key, int], ...] = ()
    depth: int = 1
    product: bool = False


@dataclass(slots=True)
class SeenTensor:
    """A saved tensor in the step that runs; moments as of `cswap.fit.problem.Saved`.

    Attributes:
        names: of its saves.
        nbytes: its raw bytes.
        born: moment of the first.
        first_use: moment; 0: not yet.
        last_use: likewise.
        gone: moment at which autograd had let go of it; 0: not seen.
        left: moment at which forward had let go of its memory; 0: not seen.
    """

    names: list[Key]
    nbytes: int
    born: int
    first_use: int = 0
    last_use: int = 0
    gone: int = 0
    left: int = 0


@dataclass(slots=True)
class Step:
    """The record of a step, from one forward to the next.

    Attributes:
        explored: whether each tensor was held in its smallest way.
        looked: whether its tensors were looked at; else all below is empty but ``n_uses``, and
            ``small_bytes`` is of the step before.
        seen: the tensors that were decided about, by step and position of the engine.
        n_moments: how many saves and uses there were.
        n_uses: how many uses.
        small_bytes: of tensors that are left alone (too small, for the most part).
        kept: raw bytes of the tensors that stay by the plan, by their number there.
        unknown_bytes: raw bytes of tensors that the plan does not know.
        grown: raw bytes of tensors that are larger than the plan knows them, by their number there.
        changed: it saved another tensor than the step before.
        hooks_s: seconds of this thread in the engine.
        began_s: when its forward began.
        ended_s: when its last tensor was used.
        stranger: another thread saved tensors, too.
        last: the object that autograd holds for the tensor that was saved last.
    """

    explored: bool
    looked: bool = True
    seen: dict[tuple[int, int], SeenTensor] = field(default_factory=dict)
    n_moments: int = 0
    n_uses: int = 0
    small_bytes: int = 0
    kept: dict[int, int] = field(default_factory=dict)
    unknown_bytes: int = 0
    grown: dict[int, int] = field(default_factory=dict)
    changed: bool = False
    hooks_s: float = 0.0
    began_s: float = field(default_factory=time.perf_counter)
    ended_s: float = 0.0
    stranger: bool = False
    last: weakref.ref[Kept | PackedView] | None = None

    @property
    def waits(self) -> bool:
        """Whether its backward has yet to come: nothing was used, and the graph is still there."""
        return not self.n_uses and self.last is not None and self.last() is not None

    @property
    def raw_bytes(self) -> int:
        """Raw bytes of the tensors that were decided about."""
        return sum(self.kept.values()) + sum(one.nbytes for one in self.seen.values())

    @property
    def step_s(self) -> float:
        """Seconds of forward and backward."""
        return max(0.0, self.ended_s - self.began_s)
