"""A goal's plan by greedy search, where no solver finds one: `greedy`."""

from __future__ import annotations

from dataclasses import replace
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
        self.total = sum(
            (problem.bytes_of(i, w) for i, w in self.ways.items()), problem.other_bytes()
        )
        self.added_s = sum(map(problem.alone_s, self.ways.values()))

    def changes(self) -> list[_Change]:
        """Every change: seconds that it adds, bytes at each moment, index, way."""
        problem = self.problem
        again = {i for i, way in self.ways.items() if way.action == REMAT}
        found: list[_Change] = []
        for i, now in self.ways.items():
            before = problem.bytes_of(i, now)
            found += [
                (problem.alone_s(w) - problem.alone_s(now), problem.bytes_of(i, w) - before, i, w)
                for w in problem.saved[i].ways
                if w is not now and (i, w) not in self._left
                if w.action != REMAT or self._may_run(i, again)
            ]
        return found

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
        useful = [
            change
            for change in state.changes()
            if change[1][moment] < 0
            and (state.total + change[1]).max() <= most
            and state.added_s + change[0] <= limit_s
        ]
        if not useful:
            break
        state.take(min(useful, key=lambda c: max(c[0], 0.0) / -c[1][moment]))
    return state.plan()


def _kept(ways: tuple[Way, ...]) -> Way:
    return next(way for way in ways if way.action == KEEP)
