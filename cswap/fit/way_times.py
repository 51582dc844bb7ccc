"""Seconds that tensors take in the engine under a plan, and a problem with those: `WayTimes`.

Note [prices from steps that obey]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A problem's first prices come from trials: an operator runs again at once, with its inputs in the
caches, and the hooks have a constant price. In a step that obeys a plan, the caches are cold, and
the same takes two to four times as long. So the time of each tensor that leaves is measured in the
steps without a look, from its pack to its last unpack. Where a way was not measured, its price
grows by the excess of those that were and had a price of the same kind: computed again, encoded in
a step that was explored, or foretold. Where there are none of its kind, the first price stands:
if the next plan takes that way, it will be measured.

On a GPU these are seconds of the host, which is ahead of the device: `Way.host_s`.
"""

from __future__ import annotations

import statistics
from collections import defaultdict, deque
from dataclasses import replace
from typing import TYPE_CHECKING, Final

from cswap.advisor.live_costs import KEEP, REMAT
from cswap.engine.order.chooser import MOST_TOOK
from cswap.fit.seen import LEAST_TIMED

if TYPE_CHECKING:
    from collections.abc import Mapping

    from cswap.engine.order.chooser import Took
    from cswap.fit.problem import Problem
    from cswap.fit.saved import Decided, Key, Saved, Way
    from cswap.fit.seen import Step

RUNS: Final = 8
"""Latest steps whose median counts."""


class WayTimes:
    """Times by save and action. For one thread.

    Attributes:
        took: times of tensors in steps without a look.
    """

    def __init__(self) -> None:
        self.took: Took = deque(maxlen=MOST_TOOK)
        self._expected: dict[tuple[int, int], tuple[Key, str]] = {}
        self._times: dict[tuple[Key, str], deque[float]] = defaultdict(lambda: deque(maxlen=RUNS))

    def settle(self, step: Step, decided: Mapping[Key, Decided]) -> None:
        """Add the times of a step that has ended. A step that was looked at says which is which.

        Args:
            step: that has ended.
            decided: by the plan that it obeyed.
        """
        if step.looked:
            self._expect(step, decided)
        while self.took:
            position, nbytes, seconds = self.took.popleft()
            way = self._expected.get((position, nbytes))
            if way is not None and not step.looked:
                self._times[way].append(seconds)

    def expect_others(self) -> None:
        """The plan has changed: until a step is looked at, nobody knows which tensor is which."""
        self._expected.clear()
        self.took.clear()

    def forget(self) -> None:
        """Forget all times: the next steps save other tensors."""
        self.expect_others()
        self._times.clear()

    def seconds(self, name: Key, action: str) -> float | None:
        """Median of the latest steps; None: too few."""
        times = self._times.get((name, action), ())
        return statistics.median(times) if len(times) >= LEAST_TIMED else None

    def repriced(self, problem: Problem) -> Problem | None:
        """The problem with measured times; None: none was measured."""
        measured = {
            (i, way.action): seconds
            for i, saved in enumerate(problem.saved)
            for way in saved.ways
            if (seconds := self.seconds(saved.names[0], way.action)) is not None
        }
        if not measured:
            return None
        if problem.over_link is not None:
            return _with_host_times(problem, measured)
        excess_s = _excess(problem, measured)

        def price(i: int, way: Way) -> Way:
            if way.action == KEEP:
                return way
            seconds = measured.get((i, way.action))
            if seconds is None:
                seconds = way.added_s + excess_s.get(_kind(way), 0.0)
            return way._replace(added_s=seconds)

        def with_prices(i: int, saved: Saved) -> Saved:
            return replace(saved, ways=tuple(price(i, way) for way in saved.ways))

        return problem.having([with_prices(i, one) for i, one in enumerate(problem.saved)])

    def _expect(self, step: Step, decided: Mapping[Key, Decided]) -> None:
        self._expected = {
            (position, one.nbytes): (one.names[0], decision.action)
            for (_, position), one in step.seen.items()
            if (decision := decided.get(one.names[0])) is not None
        }


def _with_host_times(problem: Problem, measured: Mapping[tuple[int, str], float]) -> Problem:
    # A GPU's host is in the hooks for so long, and takes so many times the assumed time for all
    # tensors of a kind. In some it waits for the device, so the lower quartile counts. A codec that
    # was not measured takes as long as the others.
    found: defaultdict[str, list[float]] = defaultdict(list)
    for i, saved in enumerate(problem.saved):
        for way in saved.ways:
            seconds = measured.get((i, way.action))
            if seconds is not None and way.host_s:
                found[way.action].append(seconds / way.host_s)
                if way.action != REMAT:
                    found[""].append(seconds / way.host_s)
    factors = {kind: sorted(some)[len(some) // 4] for kind, some in found.items()}

    def price(way: Way) -> Way:
        others = 1.0 if way.action == REMAT else factors.get("", 1.0)
        return way._replace(host_s=factors.get(way.action, others) * way.host_s)

    return problem.having([replace(s, ways=tuple(map(price, s.ways))) for s in problem.saved])


def _kind(way: Way) -> tuple[bool, bool]:
    # Of its first price.
    return way.action == REMAT, way.in_step


def _excess(
    problem: Problem, measured: Mapping[tuple[int, str], float]
) -> dict[tuple[bool, bool], float]:
    # Seconds by which measured ways are above their first price, by the kind of that.
    found: defaultdict[tuple[bool, bool], list[float]] = defaultdict(list)
    for i, saved in enumerate(problem.saved):
        for way in saved.ways:
            seconds = measured.get((i, way.action))
            if seconds is not None:
                found[_kind(way)].append(seconds - way.added_s)
    return {kind: max(0.0, statistics.median(some)) for kind, some in found.items()}
