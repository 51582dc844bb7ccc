"""A goal's problem: saved tensors over the moments of a step, and the ways to hold them.

Note [bytes over a step]
~~~~~~~~~~~~~~~~~~~~~~~~
A moment is a tensor's save or a tensor's use. From its save to its last use a tensor takes the
bytes of the way in which it is held, and from its first use on its raw bytes. Over a link it takes
its raw bytes for some moments more: a copy has to end first (`LAG`), and one back begins before the
use (`AHEAD`). An operator holds its inputs until it has run (`DWELL`). A tensor that is computed
again needs its inputs before their own use: see Note [inputs are lent] in lent.py.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from copy import copy
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Final, Literal, NamedTuple

import numpy as np

from cswap.advisor.live_costs import KEEP, REMAT
from cswap.devices.cpu import CpuDevice
from cswap.engine.recomputer import GOAL_DEPTH, LINK_DEPTH
from cswap.fit.lent import are_there, lent_of
from cswap.fit.saved import Decided, Way

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from cswap.fit.link_rates import LinkRates
    from cswap.fit.saved import Key, Saved

LAG: Final = 2
"""Moments after its save for which a tensor that is encoded is still there."""

AHEAD: Final = 2
"""Moments before its first use at which a tensor may have been decoded already."""

DWELL: Final = 1
"""Moments after its last use for which it is still there, where that was not seen."""

MOST_MOMENTS: Final = 96
"""Slots of a step, at most: of longer steps, each has several moments."""


@dataclass(frozen=True, slots=True)
class OverLink:
    """A device with a link, and the computation of a step that can hide its copies.

    Attributes:
        link: its rates.
        durations: [moments] seconds of the computation in front of each moment.
        step_s: of the whole step, up to the next one (the optimizer's time, say, is in it).
        host_ahead: [moments] seconds by which the host is ahead of the device.
        other_bytes: [moments] that the program holds besides, beyond the least that it holds.
    """

    link: LinkRates
    durations: NDArray[np.float64]
    step_s: float
    host_ahead: NDArray[np.float64]
    other_bytes: NDArray[np.float64]

    def at(self, n_moments: int) -> OverLink:
        """The same at so many moments.

        A step may have more than its problem: of tensors that nobody uses. Or fewer: after its last
        use a tensor is still held. No computation is left then, and the host stays ahead.
        """
        return replace(
            self,
            durations=_long(self.durations, n_moments),
            host_ahead=_long(self.host_ahead, n_moments, mode="edge"),
            other_bytes=_long(self.other_bytes, n_moments),
        )


class Times(NamedTuple):
    """The times of a plain step.

    Attributes:
        durations: [moments] seconds of the computation in front of each moment.
        host_ahead: [moments] seconds by which the host is ahead of the device.
        step_s: of the whole step.
    """

    durations: NDArray[np.float64]
    host_ahead: NDArray[np.float64]
    step_s: float


class Moves(NamedTuple):
    """Copies over a link beside a step's computation.

    Attributes:
        most_bytes: of tensors that may be under way, each way.
        passing_bytes: of memory that encodings pass through.
        added_s: seconds that the plan adds to a step.
    """

    most_bytes: int
    passing_bytes: float
    added_s: float


@dataclass(frozen=True, slots=True)
class FitPlan:
    """A decision for each tensor of a step.

    Attributes:
        decided: by save.
        peak_bytes: predicted most bytes at a moment, of saved tensors and `Problem.other_bytes`.
        added_s: predicted seconds that it adds to a step.
        raw_bytes: of the tensors that it decides about.
        counts: of these tensors by action.
        under_way_bytes: most bytes of tensors that are on their way, out or back, by the solver.
        searches: ``peak_bytes`` and ``added_s`` by search, of the plans of which it was the best;
            empty: there was one search, or none. A file does not have them.
    """

    decided: Mapping[Key, Decided]
    peak_bytes: int
    added_s: float
    raw_bytes: int
    counts: Counter[str]
    under_way_bytes: int = 0
    searches: Mapping[str, tuple[int, float]] = field(default_factory=dict, compare=False)


class Problem:
    """A step's saved tensors, as tables.

    Attributes:
        saved: the tensors.
        over_link: the link, and the computation beside it; None: encodes run where a tensor is
            saved, and nothing is decoded ahead.
        turn: moment of the first use in backward.
        slots: first moments of those that a solver sees; the turn is one of its own.
        too_deep: indices of tensors that cannot all be computed again: one needs the next, and
            together they are more operators in a row than may be.
        lent: see Note [inputs are lent] in lent.py.
    """

    def __init__(self, saved: Collection[Saved], over_link: OverLink | None = None) -> None:
        """A problem. Args: saved: at least one tensor; over_link: see above."""
        self.saved = tuple(saved)
        self._lag, self._ahead = (0, 0) if over_link is None else (LAG, AHEAD)
        self.n_moments = 1 + max(s.last for s in self.saved)
        self.over_link = None if over_link is None else over_link.at(self.n_moments)
        self.turn = min(s.first_use for s in self.saved)
        self.slots = slots(self._counted(), self.turn, self.n_moments)
        depth, waiting_bytes = LINK_DEPTH, math.inf
        if over_link is None:
            depth, waiting_bytes = GOAL_DEPTH, CpuDevice.ready_bytes
        self.too_deep = tuple(self._too_deep(depth))
        self.lent = lent_of(self.saved, depth, waiting_bytes)

    def _counted(self) -> NDArray[np.intp]:
        # Where there are too many: but those of tensors that never move.
        counts = np.ones(self.n_moments, bool)
        if self.over_link is not None and self.n_moments > MOST_MOMENTS:
            still = [s for s in self.saved if not any(way.link_bytes for way in s.ways)]
            counts[[s.born for s in still] + [s.first_use for s in still]] = False
        return np.flatnonzero(counts)

    def having(self, saved: Collection[Saved]) -> Problem:
        """The problem with other prices or bytes.

        Args:
            saved: the tensors, in their order.
        """
        found = copy(self)
        found.saved = tuple(saved)
        return found

    def _too_deep(self, most: int) -> Iterator[frozenset[int]]:
        numbers = {name: i for i, s in enumerate(self.saved) for name in s.names}

        def deeper(chain: tuple[int, ...], depth: int) -> Iterator[frozenset[int]]:
            for name, more in self.saved[chain[-1]].needs:
                below = numbers.get(name)
                if below is None or below in chain or not self.saved[below].recomputable:
                    continue
                if depth + more + self.saved[below].depth > most:
                    yield frozenset((*chain, below))
                else:
                    yield from deeper((*chain, below), depth + more)

        found = (deeper((i,), 0) for i, one in enumerate(self.saved) if one.recomputable)
        yield from set(itertools.chain.from_iterable(found))

    def in_the_way(self, room_bytes: float, before: Collection[Key] | None) -> frozenset[Key]:
        """Tensors that hide ways of the tensors after them while they are computed again.

        These are tensors for which products run again, and those whose own ways were hidden before.
        Where the room is not enough, of the first only those count after which a tensor has no such
        way; at last, of these, those that are not larger than the tensor that they hide.

        Args:
            room_bytes: for saved tensors, if these are stored and all others have their smallest
                ways.
            before: first saves of the tensors that could be computed again before the last
                exploration; None: it was the first one.

        Returns:
            Their first saves.
        """
        again = {i for i, s in enumerate(self.saved) if s.recomputable}
        products = {i for i in again if self.saved[i].product}
        late = {i for i in again if before is not None and self.saved[i].names[0] not in before}
        # By product, the next tensor that has no such way: what lies between is computed from it.
        hidden = {
            i: next((j for j in range(i + 1, len(self.saved)) if j not in again), i)
            for i in products
        }
        hiding = {i for i in products if hidden[i] == i + 1}
        cheap = {i for i in products if self.saved[i].nbytes <= self.saved[hidden[i]].nbytes}
        cheap -= {i for i in products if hidden[i] == i}
        for found in (products | late, hiding | late, hiding):
            if self._smallest_peak(found) <= room_bytes:
                return self._firsts(found)
        # A goal that is nearly out of reach needs these ways the most.
        if self._smallest_peak(cheap, {hidden[i] for i in cheap}) <= self._smallest_peak(set()):
            return self._firsts(cheap)
        return frozenset()

    def _firsts(self, found: Collection[int]) -> frozenset[Key]:
        return frozenset(self.saved[i].names[0] for i in found)

    def _smallest_peak(self, stored: Collection[int], gone: Collection[int] = ()) -> float:
        # Bytes, if all have their smallest ways but these, which are not computed again; ``gone``
        # are taken to be.
        ways = {
            i: min(
                (w for w in one.ways if not (w.action == REMAT and i in stored)),
                key=lambda way: way.held_bytes,
            )
            for i, one in enumerate(self.saved)
        }
        nothing = {i: Way(REMAT, 0, 0.0) for i in gone}
        return self.plan({**ways, **nothing}).peak_bytes

    def taking(self, plain_s: float | None) -> Problem:
        """The problem of a step that takes so long without cswap. Args: plain_s: None: as it is."""
        over = self.over_link
        if over is None or not plain_s:
            return self
        found = copy(self)
        durations = plain_s / over.step_s * over.durations
        lead, leads = 0.0, []
        for more_s in np.diff(over.host_ahead, prepend=0.0) + durations - over.durations:
            lead = max(0.0, lead + more_s)
            leads.append(lead)
        found.over_link = replace(
            over, durations=durations, host_ahead=np.array(leads), step_s=plain_s
        )
        return found

    def timed_by(self, times: Times) -> Problem:
        """The problem with the times of a plain step. Args: times: at the same moments."""
        found = copy(self)
        if self.over_link is not None:
            found.over_link = replace(self.over_link, **times._asdict()).at(self.n_moments)
        return found

    @property
    def raw_peak_bytes(self) -> int:
        """Most bytes at a moment if all tensors stay."""
        total = self.other_bytes()
        for one in self.saved:
            total[one.born : one.last + 1] += one.nbytes
        return int(total.max())

    def grown(self, nbytes: Mapping[int, int]) -> Problem:
        """The problem with larger tensors. Args: nbytes: their raw bytes, by index."""
        saved = enumerate(self.saved)
        return self.having([s.of_size(max(s.nbytes, nbytes.get(i, 0))) for i, s in saved])

    def computed_again(self) -> frozenset[Key]:
        """First saves of the tensors that can be computed again."""
        return frozenset(one.names[0] for one in self.saved if one.recomputable)

    def added_s(self, plan: FitPlan) -> float:
        """Seconds that a plan adds to a step, at this problem's prices."""
        return sum(
            self.alone_s(way)
            for saved in self.saved
            for way in saved.ways
            if way.action == plan.decided[saved.names[0]].action
        )

    def splits(self, plan: FitPlan) -> bool:
        """Whether a plan lets a part of a storage leave where another part stays."""
        keeps: dict[int, set[bool]] = {}
        for one in self.saved:
            stays = plan.decided[one.names[0]].action == KEEP
            keeps.setdefault(one.part_of, set()).add(stays)
        return any(part_of and len(found) > 1 for part_of, found in keeps.items())

    def alone_s(self, way: Way) -> float:
        """Seconds that a way adds to a step, if no computation hides its copies."""
        return way.alone_s(None if self.over_link is None else self.over_link.link)

    def other_bytes(self) -> NDArray[np.float64]:
        """Bytes at each moment that are no saved tensors', if that is known; a copy."""
        over = self.over_link
        return np.zeros(self.n_moments) if over is None else over.other_bytes.copy()

    def bytes_of(self, index: int, way: Way, *, moves: bool = True) -> NDArray[np.float64]:
        """Bytes at each moment of one tensor, held that way.

        Args:
            index: of the tensor.
            way: its way.
            moves: whether it takes time to leave and to come back; else that is counted apart.
        """
        one, found = self.saved[index], np.zeros(self.n_moments)
        end = one.last + 1
        found[one.born : end] = way.held_bytes
        if way.action != KEEP:
            lag, ahead = self._lag, self._ahead
            if way.action == REMAT or not moves:
                lag = ahead = 0
            out = min(max(one.born + lag, one.left), one.last)
            before = max(out + 1, one.first_use - ahead)
            encoded = way.held_bytes if way.action != REMAT else 0
            found[one.born : out + 1] = one.nbytes
            found[one.born + lag + 1 : out + 1] += encoded
            found[before:end] = one.nbytes + encoded
        return found

    def lent_bytes(self, ways: Mapping[int, Way]) -> NDArray[np.float64]:
        """Bytes at each moment of inputs that are lent. Args: ways: by index of the tensor."""
        found = np.zeros(self.n_moments)
        for one in itertools.compress(self.lent, are_there(self.lent, ways)):
            found[one.begin : one.end] += self.saved[one.number].nbytes
        return found

    def under_way(self, ways: Mapping[int, Way], most_bytes: int) -> NDArray[np.float64]:
        """Bytes at each moment that tensors on their way over a link may take.

        Memory is taken and given back in the order of the host, which may be ahead of the device.
        So the tensors that were saved last are held as far as the bound lets them; in backward, the
        next ones that will be used (link/link.py).

        Args:
            ways: by index of the tensor.
            most_bytes: the bound.
        """
        moved = [self.saved[i] for i, way in ways.items() if way.link_bytes]
        moments = np.arange(self.n_moments)
        out = _latest([(one.born, one.nbytes) for one in moved], moments, most_bytes)
        back = [(-one.first_use, one.nbytes) for one in moved]
        ahead = _latest(back, -moments - 1, most_bytes)
        return np.where(moments < self.turn, out, ahead)

    def plan(self, ways: Mapping[int, Way], moves: Moves | None = None) -> FitPlan:
        """The plan that holds tensors in these ways.

        Args:
            ways: by index of the tensor.
            moves: copies, as the solver expects them; default: as if no computation hid them.
        """
        total = self.other_bytes() + self.lent_bytes(ways)
        raw_bytes = sum(self.saved[i].nbytes for i in ways)
        for index, way in ways.items():
            total += self.bytes_of(index, way, moves=moves is None)
        if moves is None:
            total += max((way.passing_bytes for way in ways.values()), default=0)
        else:
            total += self.under_way(ways, moves.most_bytes) + moves.passing_bytes
        return FitPlan(
            {
                name: Decided(way.action, i, self.saved[i].nbytes)
                for i, way in ways.items()
                for name in self.saved[i].names
            },
            int(total.max()),
            sum(map(self.alone_s, ways.values())) if moves is None else moves.added_s,
            raw_bytes,
            Counter(way.action for way in ways.values()),
            0 if moves is None else moves.most_bytes,
        )


def _long(
    values: NDArray[np.float64], n_moments: int, mode: Literal["constant", "edge"] = "constant"
) -> NDArray[np.float64]:
    # mode: of `np.pad`; zeros by default.
    if not len(values):
        return np.zeros(n_moments)
    return np.pad(values[:n_moments], (0, max(0, n_moments - len(values))), mode)


def _latest(
    tensors: Iterable[tuple[int, int]], moments: NDArray[np.int64], most_bytes: int
) -> NDArray[np.float64]:
    # Bytes at each moment of the last of these tensors (moment, bytes), within a bound.
    inorder = sorted(tensors)
    sums = np.cumsum([0, *(nbytes for _, nbytes in inorder)])
    n = np.searchsorted([moment for moment, _ in inorder], moments, "right")
    found: NDArray[np.float64] = (sums[n] - sums[np.searchsorted(sums, sums[n] - most_bytes)]) * 1.0
    return found


def slots(moments: NDArray[np.intp], turn: int, n_moments: int) -> NDArray[np.intp]:
    """First moments of `MOST_MOMENTS` slots at most, but for the turn, which is one of its own.

    Args:
        moments: that count: each slot has as many of them as another.
        turn: see `Problem`.
        n_moments: of the step.
    """
    n_slots = min(len(moments), MOST_MOMENTS)
    even = np.linspace(0, len(moments), n_slots, endpoint=False).astype(np.intp)
    found: NDArray[np.intp] = np.union1d(moments[even], [0, turn, turn + 1])
    return found[found < n_moments]
