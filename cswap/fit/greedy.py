"""A goal's plan by greedy search, without a solver or beside it: `greedy`."""

from __future__ import annotations

from dataclasses import replace
from operator import itemgetter
from typing import TYPE_CHECKING

from cswap.advisor.live_costs import KEEP, REMAT
from cswap.fit.problem import Moves

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import TypeAlias

    import numpy as np
    from numpy.typing import NDArray

    from cswap.fit.problem import FitPlan, Problem
    from cswap.fit.saved import Way

    _Change: TypeAlias = tuple[float, NDArray[np.float64], int, Way]


class Search:
    """The greedy search's state: a way for each tensor, and bytes at each moment."""

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self.ways = {i: _kept(s.ways) for i, s in enumerate(problem.saved)}
        self._left: set[tuple[int, Way]] = set()  # no tensor returns to a way: the search ends
        self._bytes = {
            (i, way): problem.bytes_of(i, way)
            for i, saved in enumerate(problem.saved)
            for way in saved.ways
        }
        held = (self._bytes[one] for one in self.ways.items())
        self._lent = problem.lent_bytes(self.ways)
        self.total = sum(held, problem.other_bytes() + self._lent)
        # Tensors whose ways decide about inputs that are lent.
        self._lend = {one.number for one in problem.lent}
        self._lend |= {asker.number for one in problem.lent for asker in one.askers}
        self.added_s = sum(map(problem.alone_s, self.ways.values()))

    def changes(self, moment: int) -> Iterator[_Change]:
        """The changes that take bytes off a moment, those of the least time per byte first.

        Each is the seconds that it adds, the bytes at each moment, the index, and the way.
        """
        alone_s, found = self.problem.alone_s, []
        for i, now in self.ways.items():
            most = self._bytes[i, now][moment]
            for way in self.problem.saved[i].ways:
                less = most - self._bytes[i, way][moment]
                if less > 0 and (i, way) not in self._left:
                    added_s = alone_s(way) - alone_s(now)
                    found.append((max(added_s, 0.0) / less, added_s, i, way))
        again = {i for i, way in self.ways.items() if way.action == REMAT}
        for _, added_s, i, way in sorted(found, key=itemgetter(0)):
            if way.action != REMAT or self._may_run(i, again):
                yield added_s, self._more(i, way), i, way

    def _more(self, index: int, way: Way) -> NDArray[np.float64]:
        # Bytes at each moment that a change takes.
        found = self._bytes[index, way] - self._bytes[index, self.ways[index]]
        if index not in self._lend:
            return found
        return found + self.problem.lent_bytes({**self.ways, index: way}) - self._lent

    def _may_run(self, index: int, again: set[int]) -> bool:
        # Whether a tensor can be computed again besides these.
        too_deep = self.problem.too_deep
        return not any(index in chain and chain - {index} <= again for chain in too_deep)

    def take(self, change: _Change) -> None:
        """Make a change."""
        added_s, nbytes, index, way = change
        self._left.add((index, self.ways[index]))
        self.ways[index] = way
        self.added_s += added_s
        self.total = self.total + nbytes
        if index in self._lend:
            self._lent = self.problem.lent_bytes(self.ways)

    def plan(self) -> FitPlan:
        """The plan of these ways."""
        problem, ways = self.problem, self.ways
        if problem.over_link is None:
            return problem.plan(ways)
        most = max((problem.saved[i].nbytes for i, w in ways.items() if w.link_bytes), default=0)
        passing = max(way.passing_bytes for way in ways.values())
        added_s = sum(map(problem.alone_s, ways.values()))
        return problem.plan(ways, Moves(2 * most, passing, added_s))

    def take_smallest(self) -> None:
        """Hold each tensor in its smallest way, the first ones first."""
        again: set[int] = set()
        for i, saved in enumerate(self.problem.saved):
            ways = sorted(saved.ways, key=lambda way: (way.held_bytes, way.added_s))
            self.ways[i] = next(
                way for way in ways if way.action != REMAT or self._may_run(i, again)
            )
            if self.ways[i].action == REMAT:
                again.add(i)


def greedy(problem: Problem, limit_bytes: float, limit_s: float) -> FitPlan:
    """A plan without a solver.

    At the fullest moment it takes the change that adds the least time per byte, as long as one
    lowers that moment. Over a link, two tensors may be under way, each way.

    Args:
        problem: of a step.
        limit_bytes: at every moment, if that can be reached.
        limit_s: seconds that the plan may add to a step.
    """
    found = _searched(problem, limit_bytes, limit_s)
    if found.peak_bytes <= limit_bytes or not any(w.passing_bytes for w in _ways(problem)):
        return found
    # Memory that encodings pass through may cost more than they save.
    others = [
        replace(one, ways=tuple(way for way in one.ways if not way.passing_bytes))
        for one in problem.saved
    ]
    without = _searched(problem.having(others), limit_bytes, limit_s)
    return min(found, without, key=lambda plan: plan.peak_bytes)


def _ways(problem: Problem) -> Iterator[Way]:
    for one in problem.saved:
        yield from one.ways


def _searched(problem: Problem, limit_bytes: float, limit_s: float) -> FitPlan:
    state = Search(problem)
    while state.total.max() > limit_bytes or state.plan().peak_bytes > limit_bytes:
        moment, most = int(state.total.argmax()), state.total.max()
        for change in state.changes(moment):
            if (state.total + change[1]).max() <= most and state.added_s + change[0] <= limit_s:
                state.take(change)
                break
        else:
            break
    return state.plan()


def _kept(ways: tuple[Way, ...]) -> Way:
    return next(way for way in ways if way.action == KEEP)
