"""Records of a step, as a goal sees it."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import numpy as np

from cswap.devices.stopwatch import HOST

if TYPE_CHECKING:
    import weakref

    from numpy.typing import NDArray

    from cswap.devices.stopwatch import Stopwatch
    from cswap.engine.saved.packed import Kept, PackedView
    from cswap.engine.saved.unread import Unread
    from cswap.fit.saved import Key

UNSEEN_S: Final = 10e-6
"""Seconds of a saved tensor on a CPU that no hook sees: torch's two calls of Python, hooks of
modules. Caches that are left cold count in `ALLOWED` (pace.py)."""

LEAST_TIMED: Final = 4
"""Steps before there is a time that decides: one may have been delayed by another process."""

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
        depth, product: see `cswap.fit.saved.Saved`.
    """

    inputs: tuple[tuple[Key, int], ...] = ()
    depth: int = 1
    product: bool = False


@dataclass(slots=True)
class SeenTensor:
    """A saved tensor in the step that runs; moments as of `cswap.fit.saved.Saved`.

    Attributes:
        names: of its saves.
        nbytes: its raw bytes.
        born: moment of the first.
        first_use: moment; 0: not yet.
        last_use: likewise.
        gone: moment at which autograd had let go of it; 0: not seen.
        left: moment at which forward had let go of its memory; 0: not seen.
        part_of: see `cswap.fit.saved.Saved`.
    """

    names: list[Key]
    nbytes: int
    born: int
    first_use: int = 0
    last_use: int = 0
    gone: int = 0
    left: int = 0
    part_of: int = 0


class Lap(NamedTuple):
    """One tensor's time in the engine; marks are the step's stopwatch's.

    Attributes:
        moment: of the step, that came next when the engine was entered.
        is_use: whether a tensor was asked for; else one was saved.
        stays: whether it is no tensor that the engine decides about, when it is saved.
        other_bytes: at most that the program held since the lap before, besides the engine's.
        entered, left: marks.
    """

    moment: int
    other_bytes: int
    entered: Any
    left: Any
    is_use: bool = False
    stays: bool = False


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
        watch: of its marks.
        laps: in the engine, if it was looked at.
        began: mark of the beginning of its forward.
        ended: mark of its end; None: not yet. On a CPU, of the use of its last tensor; on a GPU,
            whose host is ahead, of the beginning of the next forward.
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
    watch: Stopwatch = HOST
    laps: list[Lap] = field(default_factory=list)
    began: Any = None
    ended: Any = None
    stranger: bool = False
    last: weakref.ref[Kept | PackedView | Unread] | None = None

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
        """Seconds from its beginning to its end. A GPU's are waited for."""
        return 0.0 if self.ended is None else self.watch.seconds(self.began, self.ended)

    @property
    def hooks_s(self) -> float:
        """Seconds of these in the engine: on a GPU, in which its computation stood still."""
        return sum(self.watch.seconds(lap.entered, lap.left) for lap in self.laps)

    @property
    def plain_s(self) -> float:
        """Seconds that it would have taken without the engine."""
        n_saved = 0 if self.watch is not HOST else sum(not lap.is_use for lap in self.laps)
        return max(self.step_s - self.hooks_s - UNSEEN_S * n_saved, 1e-9)

    def durations(self) -> NDArray[np.float64]:
        """[moments] seconds of the program's own computation in front of each moment."""
        found = np.zeros(self.n_moments)
        if not self.n_moments:
            return found
        for before, lap in zip([None, *self.laps], self.laps, strict=False):
            since = self.began if before is None else before.left
            moment = min(lap.moment, self.n_moments - 1)
            found[moment] += self.watch.seconds(since, lap.entered)
        return found

    def other_bytes(self) -> NDArray[np.float64]:
        """[moments] at most that the program held after each moment, besides the engine's."""
        found = np.full(self.n_moments, -1.0)
        for lap in self.laps if self.n_moments else ():
            after = max(0, lap.moment - 1)
            found[after] = max(found[after], lap.other_bytes)
        for i in np.flatnonzero(found < 0):  # between two tensors that leave together
            found[i] = found[i - 1] if i else max(0.0, found[1:].max(initial=0.0))
        return found

    def host_ahead(self) -> NDArray[np.float64]:
        """[moments] seconds by which the host is ahead of the device since the first of them."""
        found, watch = np.zeros(self.n_moments), self.watch
        for a, b in pairwise(self.laps) if self.n_moments else ():
            gap = a.left, b.entered
            moment = min(b.moment, self.n_moments - 1)
            found[moment] += watch.seconds(*gap) - watch.host_seconds(*gap)
        ahead: NDArray[np.float64] = np.maximum(0.0, found.cumsum())
        return ahead
