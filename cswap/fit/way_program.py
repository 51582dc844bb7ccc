"""A goal's plan as a mixed-integer linear program, solved by HiGHS: `WayProgram`.

The variables are the ways of the tensors, and the inputs that are lent (lent.py); over a link, the
bytes that move in each slot of the step, too (link_program.py).

Note [most tensors are decided by the relaxation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The program of a large model takes HiGHS long; with a link, minutes. Its relaxation, in which a
tensor may have a share of several ways, takes a small part of that, and gives most tensors one way.
So these are fixed, and the solver decides about the others. On five models with a link the plan was
within 2 % of the relaxation's bytes, which no plan can be below. A plan further away than `FAR` is
compared with that of the whole program, and a program of few variables is solved whole at once.

Note [a busy machine makes the same plan]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The search ends after so many nodes (`NODES`, `NODES_ALONE`) and not after some time.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cswap.advisor.live_costs import KEEP, REMAT
from cswap.fit.alike import alike
from cswap.fit.background import is_ending
from cswap.fit.goal import most_bytes
from cswap.fit.link_program import MOST, N_BLOCKS, N_SINGLE, PASSING, LinkProgram
from cswap.fit.problem import FitPlan, Moves, Problem

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Mapping

    from numpy.typing import NDArray

    from cswap.fit.saved import Way

GAP: Final = 0.005
"""Relative distance from the optimum at which the solver stops."""

MOST_S: Final = 60.0
"""Seconds after which the solver stops: for programs larger than any of ours, since a busy machine
makes another plan then."""

NODES_ALONE: Final = 100
"""Nodes of the search tree after which the solver stops. Programs of ours take eleven at most."""

SEARCH: Final = {"time_limit": MOST_S, "mip_rel_gap": GAP, "node_limit": NODES_ALONE}
"""Options of the solver."""

NODES: Final = 10
"""The same with a link. The first one, with the solver's heuristics, takes up to three seconds and
finds nearly the best plan."""

SEARCH_OVER_LINK: Final = {"time_limit": MOST_S, "mip_rel_gap": 0.015, "node_limit": NODES}
"""Options of the solver with a link."""

FEW: Final = 200
"""Ways of all tensors up to which HiGHS solves the whole program with a link in a second."""

FEW_ALONE: Final = 1000
"""The same without a link, where the relaxation takes more of the training's memory."""

MOST_WAYS: Final = 1200
"""Ways of all tensors, above which like tensors of several blocks have one: see the Note in
alike.py."""

FAR: Final = 0.02
"""Distance of a plan from the relaxation: in bytes, over these; in time, over that of a step, or
without a link, over itself."""

WHOLE: Final = 1e-6
"""Distance from 0 or 1 up to which a share is taken for that."""

MOST_TRIES: Final = 4
"""Limits of the program, each smaller than the one before, until its plan holds the one asked."""

OFF_PEAK: Final = 0.25
"""Worth of a byte at all moments of a step, over that of one at its peak, where host memory is
device memory: nobody knows there when the program itself holds the most."""

MOST_BYTES: Final = 1e15
"""A limit that holds nothing down."""

ROUNDED: Final = 1e-3
"""MiB that a plan may have more under way than it says: it says whole bytes."""

MIB: Final = float(1 << 20)
MS: Final = 1e3


def useful(ways: tuple[Way, ...]) -> Iterator[Way]:
    """The ways without those than which another codec is better in everything.

    An operator may be forbidden to run again, so it is better than none.
    """

    def costs(way: Way) -> tuple[float, ...]:
        return way.held_bytes, way.added_s, way.link_bytes, way.host_s, way.passing_bytes

    better = [way for way in ways if way.action not in (KEEP, REMAT)]
    for way in ways:
        mine = costs(way)
        if way not in better or not any(
            all(a <= b for a, b in zip(costs(one), mine, strict=True))
            and (costs(one) != mine or better.index(one) < better.index(way))
            for one in better
        ):
            yield way


@dataclass(frozen=True, slots=True)
class _Variable:
    """A binary variable: a tensor's way."""

    index: int
    way: Way


@dataclass(frozen=True, slots=True)
class _Arrays:
    """A program as HiGHS gets it.

    Attributes:
        n_ways: the first columns, which are 0 or 1.
        cost: [columns], to be as small as possible.
        upper: [columns], the largest values; the smallest are 0.
        constraints: of scipy.
        options: of the solver.
    """

    n_ways: int
    cost: NDArray[np.float64]
    upper: NDArray[np.float64]
    constraints: list[Any]
    options: Mapping[str, float]

    def best(
        self,
        *,
        fixed: NDArray[np.bool_] | None = None,
        at: Any = None,
        whole: bool = True,
    ) -> NDArray[np.float64] | None:
        """The best values [columns] that are found; None: none are.

        Args:
            fixed: [ways] whether a way has the value ``at``.
            at: [ways], see ``fixed``.
            whole: whether ways are 0 or 1; else a tensor may have a share of several.
        """
        from scipy.optimize import Bounds, milp

        lower, upper, n = np.zeros_like(self.upper), self.upper.copy(), self.n_ways
        if fixed is not None:
            lower[:n][fixed] = upper[:n][fixed] = np.asarray(at)[fixed]
        found: NDArray[np.float64] | None = milp(
            self.cost,
            constraints=self.constraints,
            integrality=whole * (np.arange(len(self.cost)) < n),
            bounds=Bounds(lower, upper),
            options=dict(self.options),  # scipy takes the limit of nodes out of its argument
        ).x
        return found


class WayProgram:
    """A problem as the matrices of a linear program."""

    def __init__(self, problem: Problem, *, every_way: bool = False) -> None:
        self._problem = problem
        some = list if every_way else useful
        ways = [tuple(some(s.ways)) for s in problem.saved]
        self._variables = [_Variable(i, way) for i, mine in enumerate(ways) for way in mine]
        self._link: LinkProgram | None = None
        if problem.over_link is not None:
            self._link = LinkProgram(problem, [(v.index, v.way) for v in self._variables])
        n_blocks = 1 if every_way else math.ceil(len(self._variables) / MOST_WAYS)
        actions = (tuple(way.action for way in mine) for mine in ways)
        self._groups = alike(zip(problem.saved, actions, strict=True), n_blocks)
        # The columns of the variables, of the link and of the inputs that are lent.
        ways_at = _numbered((self._groups[v.index], v.way.action) for v in self._variables)
        self._n_ways = 1 + max(ways_at)
        self._end = self._n_ways + 2 + (0 if self._link is None else self._link.n_columns)
        users = {one.first_use: self._groups[i] for i, one in enumerate(problem.saved)}
        lent = _numbered((self._groups[one.number], users[one.begin]) for one in problem.lent)
        between = range(self._n_ways, self._end)
        self._at = np.array([*ways_at, *between, *(self._end + n for n in lent)])
        self._added_ms = MS * np.array([v.way.added_s for v in self._variables])

    def within(self, limit_bytes: float) -> FitPlan | None:
        """The plan of the least time within so many bytes; None: see `solve`.

        The program knows tensors on their way as a flow of bytes. Where the engine holds more of
        them (`Problem.under_way`), the program gets a smaller limit.
        """
        limit = limit_bytes
        for _ in range(MOST_TRIES):
            found = self.solve(limit_bytes=limit, limit_s=math.inf)
            if found is None or found.peak_bytes <= most_bytes(limit_bytes):
                return found
            limit -= found.peak_bytes - limit_bytes
        return None

    def solve(
        self, *, limit_bytes: float, limit_s: float, like: FitPlan | None = None
    ) -> FitPlan | None:
        """The best plan that HiGHS finds; None: none, or the process ends.

        With a limit of bytes the time is minimised, without one the bytes are.

        Args:
            limit_bytes: see `found_for`.
            limit_s: see `found_for`.
            like: a plan whose ways the tensors are to have: copies and stalls alone are found, with
                as many bytes under way.
        """
        if is_ending():
            return None
        arrays = self._arrays(limit_bytes, limit_s)
        if like is not None:
            ways = np.array([self._is_of(like, v) for v in self._variables])
            if self._link is not None:
                most = like.under_way_bytes / MIB - self._link.largest[ways].max(initial=0.0)
                always = self._link.always[ways].max(initial=0.0)
                arrays.upper[self._end + MOST] = max(most, always) + ROUNDED
            x = arrays.best(fixed=np.ones(arrays.n_ways, np.bool_), at=ways, whole=False)
        else:
            over = self._problem.over_link
            step_ms = None if over is None or math.isinf(limit_bytes) else MS * over.step_s
            few = FEW_ALONE if over is None else FEW
            x = self._relaxed(arrays, step_ms) if len(self._variables) > few else arrays.best()
        return None if x is None else self._plan(x)

    def _relaxed(self, arrays: _Arrays, step_ms: float | None) -> NDArray[np.float64] | None:
        # See Note [most tensors are decided by the relaxation]. None: the cost is in bytes, or no
        # step's time is known.
        found: list[NDArray[np.float64] | None] = []
        bound = -math.inf
        if (shares := arrays.best(whole=False)) is not None:
            ways = shares[: arrays.n_ways]
            found = [arrays.best(fixed=self._decided(ways), at=np.round(ways))]
            least = float(arrays.cost @ shares)
            bound = least + FAR * (step_ms or least)
        if not found or found[0] is None or arrays.cost @ found[0] > bound:
            found.append(arrays.best())
        return min((x for x in found if x is not None), key=lambda x: arrays.cost @ x, default=None)

    def _arrays(self, limit_bytes: float, limit_s: float) -> _Arrays:
        # Columns: ways; the peak in MiB; the added time in ms; those of the link; inputs lent.
        n, link = self._n_ways, self._link
        least_bytes = math.isinf(limit_bytes)
        added = np.bincount(self._at[: len(self._added_ms)], self._added_ms).astype(np.float64)
        n_columns = 1 + int(self._at.max())
        upper = np.concatenate([np.ones(n), [np.inf if least_bytes else limit_bytes / MIB]])
        upper = np.append(upper, [MS * limit_s, *([] if link is None else link.upper)])
        upper = np.append(upper, np.ones(n_columns - self._end))
        tiny = 1e-4 / (1.0 + added.sum())  # of equal peaks, the fastest
        cost = np.zeros(n_columns)
        cost[n : n + 2] = (1.0, tiny) if least_bytes else (0.0, 1.0)
        if math.isfinite(limit_s) and link is None:
            means = OFF_PEAK * self._columns().mean(axis=0)
            cost[:n], cost[self._end :] = means[:n], means[n:-1]
        options = SEARCH if link is None else SEARCH_OVER_LINK
        return _Arrays(n, cost, upper, self._constraints(n_columns, added, link), options)

    def _constraints(
        self, n_columns: int, added: NDArray[np.float64], link: LinkProgram | None
    ) -> list[Any]:
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array, hstack

        n, (nbytes, lent, other) = len(self._variables), self._bytes()
        # [variables and those of the link, columns]
        at = self._at[: n + self._end - self._n_ways]
        tie = csr_array((np.ones(len(at)), (np.arange(len(at)), at)), (len(at), self._end))

        def rows(*blocks: Any, below: Any, above: Any = -np.inf) -> Any:
            # The first columns; the others are 0.
            made = hstack([csr_array(block) for block in blocks], format="csr")
            made.resize(made.shape[0], n_columns)
            return LinearConstraint(made, above, below)

        def ones(cells: list[tuple[int, int]]) -> Any:
            row, column = zip(*cells, strict=True)
            return csr_array((np.ones(len(cells)), (row, column)), (max(row) + 1, len(at))) @ tie

        peak = np.full((len(nbytes), 1), -1.0)
        under_way = [] if link is None else [np.tile(link.under_way(), (len(nbytes), 1))]
        found = [
            rows(nbytes, peak, np.zeros_like(peak), *under_way, lent, below=-other),
            rows(ones(self._once()), below=1.0, above=1.0),
            *self._lent_rows(n_columns),
        ]
        if apart := self._apart():
            cells = [(row, column) for row, columns in enumerate(apart) for column in columns]
            most_of = np.array([len(columns) - 1.0 for columns in apart])
            found.append(rows(ones(cells), below=most_of))
        if together := self._together():
            row = csr_array(np.vstack([np.eye(n)[a] - np.eye(n)[b] for a, b in together]))
            found.append(rows(row @ tie[:n], below=0.0, above=0.0))
        if link is None:
            return [*found, rows(np.append(added, [0.0, -1.0])[None, :], below=0.0)]
        for matrix, above, below in link.rows():
            found.append(rows(csr_array(matrix) @ tie, below=below, above=above))
        return found

    def _lent_rows(self, n_columns: int) -> Iterator[Any]:
        # An input that goes on, or is asked for by one that is computed again, is there unless it
        # stays: see `are_there`.
        from scipy.optimize import LinearConstraint
        from scipy.sparse import csr_array

        at = self._at.tolist()
        columns = {(v.index, v.way.action): c for c, v in zip(at, self._variables, strict=False)}
        lent = at[len(at) - len(self._problem.lent) :]
        cells, most = list[tuple[int, int, float]](), list[float]()

        def row(*entries: tuple[int, float], below: float) -> None:
            cells.extend((len(most), column, value) for column, value in entries)
            most.append(below)

        for n, one in zip(lent, self._problem.lent, strict=True):
            if one.before >= 0:
                row((lent[one.before], 1.0), (n, -1.0), below=0.0)
            unless = [(columns[key], -1.0) for key in [(one.number, KEEP)] if key in columns]
            for asker in one.askers:
                if (again := columns.get((asker.number, REMAT))) is not None:
                    also = [] if asker.lent < 0 else [(lent[asker.lent], 1.0)]
                    row((again, 1.0), (n, -1.0), *unless, *also, below=float(len(also)))
        if most:
            at_row, at_column, values = zip(*cells, strict=True)
            matrix = csr_array((values, (at_row, at_column)), (len(most), n_columns))
            yield LinearConstraint(matrix, -np.inf, np.array(most))

    def _is_of(self, plan: FitPlan, variable: _Variable) -> bool:
        decided = plan.decided.get(self._problem.saved[variable.index].names[0])
        return decided is not None and decided.action == variable.way.action

    def _decided(self, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        # [ways] whether the tensors have one way in the relaxation.
        owner = np.zeros(self._n_ways, np.intp)
        for column, v in zip(self._at, self._variables, strict=False):
            owner[column] = self._groups[v.index]
        several = owner[np.abs(shares - np.round(shares)) > WHOLE]
        return ~np.isin(owner, several)

    def _bytes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        # [moments, ways], [moments, lent] and the others' [moments], in MiB, without moments
        # at which no plan holds more than at another one.
        values = self._columns()
        values, n = values[undominated(values, self._problem.slots)], self._n_ways
        return values[:, :n], values[:, n:-1], values[:, -1]

    def _columns(self) -> NDArray[np.float64]:
        # [moments, ways + lent + 1] in MiB.
        problem, n_lent = self._problem, 1 + int(self._at.max()) - self._end
        alone = problem.over_link is None
        found = np.zeros((self._n_ways + n_lent + 1, problem.n_moments))
        for n, v in zip(self._at, self._variables, strict=False):
            found[n] += problem.bytes_of(v.index, v.way, moves=alone)
        at = self._at[len(self._at) - len(problem.lent) :] - self._end + self._n_ways
        for n, one in zip(at, problem.lent, strict=True):
            found[n, one.begin : one.end] += problem.saved[one.number].nbytes
        found[-1] = problem.other_bytes()
        found /= MIB
        return found.T

    def _once(self) -> list[tuple[int, int]]:
        # (tensor, variable) where the variable decides about the tensor: one of them does.
        return [(v.index, n) for n, v in enumerate(self._variables)]

    def _apart(self) -> list[list[int]]:
        # Variables that cannot all be 1: tensors that would be computed from each other in too many
        # operators.
        again = {v.index: c for c, v in enumerate(self._variables) if v.way.action == REMAT}
        chains = self._problem.too_deep
        return [[again[i] for i in chain] for chain in chains if chain <= again.keys()]

    def _together(self) -> list[tuple[int, int]]:
        # Pairs of variables that are equal: parts of one storage stay all, or leave all.
        found, firsts = [], dict[int, int]()
        for column, v in enumerate(self._variables):
            part_of = self._problem.saved[v.index].part_of
            if part_of and v.way.action == KEEP:
                first = firsts.setdefault(part_of, column)
                found += [(first, column)] if first != column else []
        return found

    def _plan(self, x: NDArray[np.float64]) -> FitPlan:
        n, x = len(self._variables), x[self._at]
        taken = x[:n] > 0.5
        ways = {v.index: v.way for v in itertools.compress(self._variables, taken)}
        if self._link is None:
            return self._problem.plan(ways)
        x = x[: n + self._end - self._n_ways]
        waits, early = x[n + 2 : -N_SINGLE].reshape(N_BLOCKS, -1)[2:4]
        always, largest = self._link.always[taken].max(), self._link.largest[taken].max()
        most = max(waits.max(), early.max(), always) + largest
        added_s = max(0.0, float(x[n + 1])) / MS  # within the solver's tolerance it may be less
        moves = Moves(int(MIB * most), MIB * x[PASSING], added_s)
        return self._problem.plan(ways, moves)


def _numbered(keys: Iterable[object]) -> list[int]:
    # A number for each: like keys have the same one.
    numbers: dict[object, int] = {}
    return [numbers.setdefault(key, len(numbers)) for key in keys]


def worth(problem: Problem, plan: FitPlan) -> float:
    """Bytes that a plan within a time makes few, without a link: see `OFF_PEAK`."""
    ways = {
        i: next(way for way in one.ways if way.action == plan.decided[one.names[0]].action)
        for i, one in enumerate(problem.saved)
    }
    held = sum(problem.bytes_of(*one).mean() for one in ways.items())
    return plan.peak_bytes + OFF_PEAK * float(held + problem.lent_bytes(ways).mean())


def undominated(rows: NDArray[np.float64], starts: NDArray[np.intp]) -> NDArray[np.intp]:
    """Moments that have a value above that of each other one of their slot.

    Args:
        rows: [moments, values].
        starts: [slots] first moment of each.
    """
    kept: list[int] = []
    for start, stop in itertools.pairwise([*starts, len(rows)]):
        slot = rows[start:stop]
        slot = slot[:, (slot != slot[0]).any(axis=0)]
        for i, row in enumerate(slot):
            alike = (slot == row).all(axis=1)
            above = (slot >= row).all(axis=1) & ~alike
            if not (above.any() or alike[:i].any()):
                kept.append(start + i)
    return np.array(kept, np.intp)
