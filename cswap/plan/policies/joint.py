"""``joint`` (ours): decides keep, swap with a codec, recompute and prefetch points together.

1. Candidates by price: each tensor takes the action with the lowest ``seconds of compute and codec
   + price of the link * seconds on it - price of memory * bytes * time away``. For several prices
   of the link, bisection finds the lowest price of memory at which the step fits.
2. Candidates by structure: the tensors saved last stay, because backward needs them first and they
   have no time to leave. All others leave in the same way. Bisection finds how many stay.
3. Candidates by flow: the shares of a linear program's solution, rounded (`ilp_candidates`).
4. Candidates by descent: two of the best candidates are crossed, tensor by tensor, and a few
   tensors change at random.
5. Local search from the best candidate: tensor by tensor, most bytes first, every other action is
   simulated and taken if the step gets shorter. Then pairs are tried: one tensor stays, another
   leaves.
6. The best candidates are tried in sections, too.

The simulator evaluates all candidates. So the plan is never worse than the simple plans among them.
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import numpy as np

from cswap.plan.policy_tools.cutting import in_sections, rank
from cswap.plan.policy_tools.ilp_candidates import guesses
from cswap.plan.policy_tools.recompute_cost import chain_s
from cswap.plan.policy_tools.search import Best
from cswap.plan.policy_tools.vdnn import CONV, features_of, inputs_of
from cswap.plan.simulate import KEEP, RECOMPUTE, SWAP

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from numpy.typing import NDArray

    from cswap.plan.policy_tools.problem import Problem
    from cswap.schema.plan import Plan

    Choice = tuple[NDArray[np.int8], NDArray[np.int8]]

EVALUATIONS: Final = 20_000
WORK: Final = 12_000_000
"""Limits of the search: at most `EVALUATIONS` candidates, and in total about `WORK` operators
simulated for all of them together."""

LINK_PRICES: Final = (0.0, 0.25, 0.5, 0.75, 1.0)
"""Prices of a second on the link in seconds of the step: 0 if copies are hidden, 1 if exposed."""

FLOW_SHARE: Final = 0.25
"""Share of the remaining time that the linear program may use."""

CHANCES: Final = 60

POOL: Final = 80
"""Number of candidates in the pool from which parents are drawn."""

CUT: Final = 8
"""Number of the best candidates that are tried in sections."""

IDLE: Final = 30
"""The descent ends after this number, times the number of tensors, of children in a row that do
not enter the pool."""

IDEAL: Final = 1e-9
"""Relative excess over the operators' time below which a step counts as optimal."""

ROUNDS: Final = 12
"""Rounds of bisection for the price of memory."""


def solve(problem: Problem) -> Plan:
    """Generate all candidates, improve the best by local search, and return its plan."""
    search = _Joint(problem)
    search.by_structure()
    search.by_price()
    search.by_flow()
    search.by_chance()
    search.by_descent()
    search.improve()
    search.by_descent(last=True)
    best = search.best
    assert best.action is not None
    assert best.codec is not None
    # Candidates were judged with swap-ins as early as memory allows, and a plan can say that.
    plan = problem.simulator.to_plan(best.action, best.codec, None, "joint")
    if best.cost_s <= problem.simulator.compute_s * (1 + IDEAL):
        return plan
    plans = [plan, in_sections(problem, plan), *search.others_in_sections()]
    return min(plans, key=rank)


class _Joint:
    def __init__(self, problem: Problem) -> None:
        self._problem = problem
        self._simulator = simulator = problem.simulator
        self.best = Best(simulator)
        self._n = len(simulator.saved)
        seconds = [operator.duration_s for operator in simulator.trace.operators]
        ends = np.cumsum(seconds, dtype=np.float64)
        self._gap_s = ends[simulator.backward - 1] - ends[simulator.forward]
        self._again_s = chain_s(simulator)
        codec_s = simulator.encode_s + simulator.decode_s
        self._codec_s = simulator.hardware.codec_tax * codec_s
        self._link_s = simulator.d2h_s + simulator.h2d_s
        self._began_s = time.monotonic()
        n_operators = len(simulator.trace.operators)
        self._evaluations = min(EVALUATIONS, max(500, WORK // max(n_operators, 1)))
        self._rng = np.random.default_rng(problem.seed)
        self._pool: list[tuple[float, NDArray[np.int8], NDArray[np.int8]]] = []
        self._n_entered = 0
        # By their own times: what a codec takes from the computation may be nothing, while a tensor
        # that waits for it waits all the same.
        self._useful = [self._codecs_of(position, codec_s) for position in range(self._n)]

    def _codecs_of(self, position: int, codec_s: NDArray[np.float64]) -> list[int]:
        # Codecs on the Pareto front of bytes and time.
        nbytes, seconds = self._simulator.encoded_bytes[position], codec_s[position]
        found: list[int] = []
        for codec in np.lexsort((nbytes, seconds)):
            if not found or nbytes[codec] < nbytes[found[-1]]:
                found.append(int(codec))
        return found

    def _stopped(self, share: float = 1.0) -> bool:
        # Whether this share of the evaluations or of the time is used, or the step is optimal.
        if self.best.cost_s <= self._simulator.compute_s * (1 + IDEAL):
            return True
        deadline, began_s = self._problem.deadline, self._began_s
        if deadline is not None and time.monotonic() > began_s + share * (deadline - began_s):
            return True
        return self.best.evaluations > share * self._evaluations or self._problem.stopped()

    def _judge(self, choice: Choice) -> float:
        action, codec = choice
        starts = self._simulator.earliest_prefetch(action, codec)
        cost_s = self.best.consider(action, codec, starts)
        fits = len(self._pool) < POOL or cost_s < self._pool[-1][0]
        if fits and all(cost_s != known for known, _, _ in self._pool):
            self._n_entered += 1
            self._pool.append((cost_s, action.copy(), codec.copy()))
            self._pool.sort(key=lambda entry: entry[0])
            del self._pool[POOL:]
        return cost_s

    def _feasible(self, choice: Choice) -> bool:
        return self._judge(choice) < self._simulator.worst_s

    def others_in_sections(self) -> Iterator[Plan]:
        """The next best candidates, in sections."""
        for _, action, codec in self._pool[1:CUT]:
            if self._problem.stopped():
                return
            plan = self._simulator.to_plan(action, codec, None, "joint")
            yield in_sections(self._problem, plan)

    # ------------------------------------------------------------ candidates

    def by_structure(self) -> None:
        """All tensors leave in one way, except those saved last; also vDNN's selections."""
        self._judge((np.full(self._n, KEEP, np.int8), np.zeros(self._n, np.int8)))
        oldest = np.argsort(self._simulator.forward, kind="stable")
        for away in self._ways():
            self._fewest(lambda count, away=away: self._first(oldest[:count], away))  # type: ignore[misc]
            if self._stopped():
                return
        trace = self._problem.trace
        for kinds in (CONV, features_of(trace)):
            action = np.where(inputs_of(trace, kinds), SWAP, KEEP).astype(np.int8)
            self._judge((action, self._best_codec()))
            self._judge((action, np.zeros(self._n, np.int8)))

    def _ways(self) -> Iterator[Choice]:
        # All tensors leave: raw; with the codec of the shortest swap; recomputed where possible,
        # else with that codec; recomputed where that is faster.
        swap, raw = np.full(self._n, SWAP, np.int8), np.zeros(self._n, np.int8)
        codec = self._best_codec()
        yield swap, raw
        yield swap, codec
        recompute = self._simulator.recomputable
        yield np.where(recompute, RECOMPUTE, SWAP).astype(np.int8), codec
        rows = np.arange(self._n)
        swap_s = self._link_s[rows, codec] + self._codec_s[rows, codec]
        cheaper = recompute & (self._again_s < swap_s)
        yield np.where(cheaper, RECOMPUTE, SWAP).astype(np.int8), codec

    def _best_codec(self) -> NDArray[np.int8]:
        return np.argmin(self._codec_s + self._link_s, axis=1).astype(np.int8)  # type: ignore[no-any-return]

    def _first(self, away: NDArray[np.int64], choice: Choice) -> Choice:
        action = np.full(self._n, KEEP, np.int8)
        action[away] = choice[0][away]
        return action, choice[1]

    def _fewest(self, make: Callable[[int], Choice]) -> None:
        low, high = 0, self._n
        while low < high and not self._stopped():
            middle = (low + high) // 2
            if self._feasible(make(middle)):
                high = middle
            else:
                low = middle + 1
        self._judge(make(high))

    def by_price(self) -> None:
        """For several prices of the link, find the lowest price of memory for a feasible step."""
        gap_bytes = self._simulator.nbytes * self._gap_s
        highest = float(np.max(self._codec_s.max(axis=1) + self._link_s.max(axis=1), initial=0.0))
        most = highest / max(float(np.min(gap_bytes[gap_bytes > 0], initial=np.inf)), 1e-30)
        for link in LINK_PRICES:
            low, high = 0.0, most
            for _ in range(ROUNDS):
                if self._stopped():
                    return
                middle = np.sqrt(max(low, 1e-9 * most) * high)
                if self._feasible(self._priced(link, middle * gap_bytes)):
                    high = middle
                else:
                    low = middle
            self._judge(self._priced(link, high * gap_bytes))

    def _priced(self, link: float, gain_s: NDArray[np.float64]) -> Choice:
        cost_s = self._codec_s + link * self._link_s
        codec = np.argmin(cost_s, axis=1).astype(np.int8)
        swap_s = cost_s[np.arange(self._n), codec]
        again_s = np.where(self._simulator.recomputable, self._again_s, np.inf)
        leave_s = np.minimum(swap_s, again_s)
        leave = np.where(again_s < swap_s, RECOMPUTE, SWAP)
        return np.where(leave_s < gain_s, leave, KEEP).astype(np.int8), codec

    def by_flow(self) -> None:
        """The solution of a mixed-integer program's relaxation, rounded in several ways."""
        limit_s = None
        if (deadline := self._problem.deadline) is not None:
            limit_s = max(0.1, FLOW_SHARE * (deadline - time.monotonic()))
        found = guesses(self._simulator, self._best_codec(), self._again_s, self._rng, limit_s)
        for choice in found:
            if self._stopped():
                return
            self._judge(choice)

    def by_chance(self) -> None:
        """Random candidates, in which from 5 % to 95 % of the tensors leave."""
        codec = self._best_codec()
        recompute = self._simulator.recomputable
        for share in np.linspace(0.05, 0.95, CHANCES):
            if self._stopped(0.3):
                return
            leaves = self._rng.random(self._n) < share
            again = recompute & (self._rng.random(self._n) < self._rng.random())
            action = np.where(leaves, np.where(again, RECOMPUTE, SWAP), KEEP).astype(np.int8)
            self._judge((action, codec))

    def by_descent(self, *, last: bool = False) -> None:
        """Cross the best candidates until most of the time is used or no child enters the pool."""
        idle = 0
        share = 1.0 if last else 0.7
        while self._pool and idle < IDLE * self._n and not self._stopped(share):
            mother, father = (self._pool[self._drawn()] for _ in range(2))
            of_mother = self._rng.random(self._n) < 0.5
            action = np.where(of_mother, mother[1], father[1]).astype(np.int8)
            codec = np.where(of_mother, mother[2], father[2]).astype(np.int8)
            self._mutate(action, codec)
            before = self._n_entered
            self._judge((action, codec))
            idle = idle + 1 if self._n_entered == before else 0

    def _drawn(self) -> int:
        # The pool is sorted by cost: the smaller of two indices prefers better candidates.
        return int(min(self._rng.integers(len(self._pool), size=2)))

    def _mutate(self, action: NDArray[np.int8], codec: NDArray[np.int8]) -> None:
        for position in self._rng.integers(self._n, size=int(self._rng.integers(1, 5))):
            options = list(self._others(int(position)))
            action[position], codec[position] = options[int(self._rng.integers(len(options)))]

    # ---------------------------------------------------------- local search

    def improve(self) -> None:
        """Change one tensor at a time, then exchange two, as long as the step gets shorter."""
        improved = True
        while improved and not self._stopped():
            improved = self._one_by_one() or self._exchanges()

    def _one_by_one(self) -> bool:
        before = self.best.cost_s
        for position in np.argsort(-self._simulator.nbytes, kind="stable"):
            if self._stopped():
                break
            for action, codec in self._others(int(position)):
                self._try({int(position): (action, codec)})
        return self.best.cost_s < before * (1 - 1e-9)

    def _others(self, position: int) -> Iterator[tuple[int, int]]:
        yield KEEP, 0
        if self._simulator.recomputable[position]:
            yield RECOMPUTE, 0
        for codec in self._useful[position]:
            yield SWAP, codec

    def _exchanges(self) -> bool:
        before = self.best.cost_s
        assert self.best.action is not None
        codec = self._best_codec()
        gone = np.flatnonzero(self.best.action != KEEP)
        kept = np.flatnonzero(self.best.action == KEEP)
        for back in self._rng.permutation(gone):
            for away in self._rng.permutation(kept)[:8]:
                if self._stopped():
                    return self.best.cost_s < before * (1 - 1e-9)
                self._try({int(back): (KEEP, 0), int(away): (SWAP, int(codec[away]))})
        return self.best.cost_s < before * (1 - 1e-9)

    def _try(self, changes: dict[int, tuple[int, int]]) -> None:
        assert self.best.action is not None
        assert self.best.codec is not None
        action, codec = self.best.action.copy(), self.best.codec.copy()
        for position, (new_action, new_codec) in changes.items():
            action[position] = new_action
            if new_action == SWAP:
                codec[position] = new_codec
        if (action != self.best.action).any() or (codec != self.best.codec).any():
            self._judge((action, codec))
