"""Finds the plan of a goal: the least time within bytes, or the fewest bytes within a time.

Both are mixed-integer linear programs, solved by HiGHS (`scipy.optimize.milp`): one of its ways
for each tensor; over a link, the bytes that move in each slot of the step, too
(link_program.py). Where scipy is missing, or HiGHS finds nothing in its time, the search is greedy
(greedy.py).

Note [most tensors are decided by the relaxation]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
With a link, the program of a large model takes HiGHS minutes. Its relaxation, in which a tensor may
have a share of several ways, takes less than 0.1 s, and gives most tensors one way. So these are
fixed, and the solver decides about the others. On five models the plan was within 2 % of the
relaxation's bytes, which no plan can be below. A plan further away than `FAR` is compared with that
of the whole program, and a program of `FEW` variables is solved whole at once.
"""

from __future__ import annotations

import itertools
import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

import numpy as np

from cswap.advisor.live_costs import KEEP, REMAT
from cswap.engine.recomputer import GOAL_DEPTH
from cswap.fit.background import is_ending
from cswap.fit.goal import most_bytes
from cswap.fit.greedy import Search, greedy
from cswap.fit.link_program import N_BLOCKS, N_LARGEST, LinkProgram
from cswap.fit.problem import FitPlan, Moves, Problem, Saved, Way, thinned

if TYPE_CHECKING:
    from collections.abc import Iterator

    from numpy.typing import NDArray

TIME_LIMIT_S: Final = 5.0
"""Of one call of the solver for a whole program."""

FEWER_LIMIT_S: Final = 20.0
"""The same where the relaxation has decided about most tensors. That takes two seconds, and on a
busy machine it must not end with another plan."""

GAP: Final = 0.005
"""Relative distance from the optimum at which the solver stops."""

GAP_OVER_LINK: Final = 0.015
"""The same with a link: it is there within two seconds, and so ends at the same plan always."""

FEW: Final = 200
"""Ways of all tensors up to which HiGHS solves the whole program in a second."""

FAR: Final = 0.03
"""Relative distance of a plan from the relaxation."""

WHOLE: Final = 1e-6
"""Distance from 0 or 1 up to which a share is taken for that."""

NEAR: Final = 1.05
"""Bytes of a plan that is nearly as small as the smallest one, over the bytes of that."""

MOST_TRIES: Final = 4
"""Limits of the program, each smaller than the one before, until its plan holds the one asked."""

OFF_PEAK: Final = 0.25
"""Worth of a byte at all moments of a step, over that of one at its peak, where host memory is
device memory: nobody knows there when the program itself holds the most."""

MOST_BYTES: Final = 1e15
"""A limit that holds nothing down."""

MIB: Final = float(1 << 20)
MS: Final = 1e3


def load_solver() -> None:
    """Import HiGHS, if scipy is there, on this thread and not on the one that makes plans.

    scipy adds filters of warnings for ever, and replaces all of them for moments. The filters are
    the program's: beside its training, such a moment could undo what the program does to them. Here
    scipy's are taken out one by one, because `warnings.catch_warnings` would forget those that
    another thread adds meanwhile.
    """
    before = list(warnings.filters)
    try:
        import scipy.optimize
        import scipy.sparse  # noqa: F401
    except ImportError:
        return
    filters = cast("list[Any]", warnings.filters)
    for added in [one for one in filters if one not in before]:
        filters.remove(added)


def has_solver() -> bool:
    """Whether scipy is there, with HiGHS and the sparse arrays of a link's program."""
    load_solver()
    try:
        from scipy.optimize import milp  # noqa: F401
        from scipy.sparse import block_array, eye_array  # noqa: F401
    except ImportError:
        return False
    return True


class Found(NamedTuple):
    """The planner's result.

    Attributes:
        plan: None: no plan holds the limit of bytes.
        smallest: the plans of the fewest bytes in that case, one at least.
        obeyed_s: seconds that the plan that is obeyed adds at the same prices; None: not known.
    """

    plan: FitPlan | None
    smallest: tuple[FitPlan, ...] = ()
    obeyed_s: float | None = None


def found_for(
    problem: Problem, limit_bytes: float, limit_s: float, obeyed: FitPlan | None = None
) -> Found:
    """The plan of a goal.

    Args:
        problem: of a step.
        limit_bytes: at every moment; `math.inf`: as few as the time allows.
        limit_s: added to a step, where there is no limit of bytes.
        obeyed: the plan that is obeyed, if the other one is to be compared with it.
    """
    if math.isinf(limit_bytes):
        return Found(within_time(problem, limit_s))
    plan = within_bytes(problem, limit_bytes)
    obeyed_s = None if obeyed is None else seconds_of(problem, obeyed)
    return Found(plan, smallest(problem) if plan is None else (), obeyed_s)


def seconds_of(problem: Problem, plan: FitPlan) -> float | None:
    """Seconds that a plan adds to a step, at a problem's prices; None: nobody can say, over a link.

    Args:
        problem: of a step.
        plan: was made for the same tensors.
    """
    if problem.over_link is None:
        return problem.added_s(plan)
    table = _Table(problem, every_way=True)
    found = table.solve(limit_bytes=MOST_BYTES, limit_s=math.inf, like=plan)
    return None if found is None else found.added_s


def within_bytes(problem: Problem, limit_bytes: float, *, exact: bool = True) -> FitPlan | None:
    """The plan that adds the least time and takes at most so many bytes; None: there is none.

    Args:
        problem: of a step.
        limit_bytes: at every moment.
        exact: by the solver, if it is there; else greedily.
    """
    # Copies that computation hides would cost the solver nothing.
    all_stay = problem.plan({i: _stays(one) for i, one in enumerate(problem.saved)})
    if all_stay.peak_bytes <= most_bytes(limit_bytes):
        return all_stay
    # With deeper chains the relaxation decides about fewer tensors, and plans are slower.
    shallow = problem.up_to(GOAL_DEPTH)
    found = _within_bytes(shallow, limit_bytes, exact=exact)
    if found is not None or shallow.too_deep == problem.too_deep:
        return found
    return _within_bytes(problem, limit_bytes, exact=exact)


def _within_bytes(problem: Problem, limit_bytes: float, *, exact: bool) -> FitPlan | None:
    for table in _tables(problem) if exact else ():
        found = table.within(limit_bytes)
        if found is not None:
            return found
    found = greedy(problem, limit_bytes, math.inf)
    if found.peak_bytes > most_bytes(limit_bytes):
        return None
    # The search prices copies as if no computation hid them.
    added_s = seconds_of(problem, found) if exact else None
    return found if added_s is None else replace(found, added_s=added_s)


def within_time(problem: Problem, limit_s: float, *, exact: bool = True) -> FitPlan:
    """The plan that takes the fewest bytes and adds at most so many seconds.

    Args:
        problem: of a step.
        limit_s: added to a step; `math.inf` gives the fewest bytes that there are.
        exact: by the solver, if it is there; else greedily.
    """
    if math.isfinite(limit_s):
        problem = problem.up_to(GOAL_DEPTH)
    found = _Table(problem).solve(limit_bytes=math.inf, limit_s=limit_s) if exact else None
    if found is None:
        return greedy(problem, 0.0, limit_s)
    return found


def smallest(problem: Problem) -> tuple[FitPlan, ...]:
    """The plans of the fewest bytes, each by a rule of its own, the smallest by prediction first.

    One of them holds each tensor in its smallest way, as the explored steps do. The last bytes may
    take much time: of plans that are nearly as small, the fastest is the first.

    Args:
        problem: of a step.
    """
    state = Search(problem)
    state.take_smallest()
    found: list[FitPlan] = []
    for plan in (
        *(table.solve(limit_bytes=math.inf, limit_s=math.inf) for table in _tables(problem)),
        greedy(problem, 0.0, math.inf),
        state.plan(),
    ):
        if plan is not None and all(plan.decided != other.decided for other in found):
            found.append(plan)
    near = NEAR * min(plan.peak_bytes for plan in found)

    def turn(plan: FitPlan) -> tuple[bool, float]:
        if plan.peak_bytes > near:
            return True, plan.peak_bytes
        seconds = seconds_of(problem, plan)  # they were made by different rules
        return False, math.inf if seconds is None else seconds

    return tuple(sorted(found, key=turn))


def _stays(saved: Saved) -> Way:
    return next(way for way in saved.ways if way.action == KEEP)


def _tables(problem: Problem) -> Iterator[_Table]:
    # In turn, until one finds a plan: see `_Table`.
    yield _Table(problem)
    if problem.over_link is not None:
        yield _Table(problem, every_moment=True)


def _useful(ways: tuple[Way, ...]) -> Iterator[Way]:
    # Without those than which another codec is better in everything. An operator may be forbidden
    # to run again, so it is better than none.
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


class _Table:
    """A problem as the matrices of a linear program.

    Over a link, a slot stands for several moments, with the most that each tensor takes at one of
    them. That is too much by some per cent: about as much as a step holds beyond its plan. If no
    plan is within the limit because of it, each moment counts by itself.
    """

    def __init__(
        self, problem: Problem, *, every_moment: bool = False, every_way: bool = False
    ) -> None:
        self._problem = problem
        self._every_moment = every_moment
        useful = iter if every_way else _useful
        ways = ((i, way) for i, s in enumerate(problem.saved) for way in useful(s.ways))
        self._variables = [_Variable(i, way) for i, way in ways]

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
        """The best plan that HiGHS finds; None: none, or no scipy, or the process ends.

        With a limit of bytes the time is minimised, without one the bytes are.

        Args:
            limit_bytes: see `found_for`.
            limit_s: see `found_for`.
            like: a plan whose ways the tensors are to have: copies and stalls alone are found.
        """
        if is_ending():
            return None
        try:
            from scipy.optimize import Bounds, LinearConstraint, milp
            from scipy.sparse import block_array, csr_array, eye_array, hstack  # noqa: F401
        except ImportError:
            return None
        n = len(self._variables)
        (nbytes, other, at), once, apart = self._bytes(), self._once(), self._apart()
        added = MS * np.array([v.way.added_s for v in self._variables])
        least_bytes = math.isinf(limit_bytes)
        # Columns: ways; the peak in MiB; the time that is added in ms; those of the link.
        link, n_columns = None, n + 2
        if self._problem.over_link is not None:
            link = LinkProgram(self._problem, [(v.index, v.way) for v in self._variables])
            n_columns += link.n_columns
        most = np.inf if least_bytes else limit_bytes / MIB

        def rows(*blocks: Any, below: Any, above: Any = -np.inf) -> Any:
            # The first columns; the others are 0.
            made = hstack([csr_array(block) for block in blocks], format="csr")
            made.resize(made.shape[0], n_columns)
            return LinearConstraint(made, above, below)

        def ones(cells: list[tuple[int, int]]) -> Any:
            row, column = zip(*cells, strict=True)
            return csr_array((np.ones(len(cells)), (row, column)), (max(row) + 1, n))

        peak = np.full((len(nbytes), 1), -1.0)
        under_way = [] if link is None else [np.zeros_like(peak), link.under_way()[at]]
        constraints = [
            rows(nbytes, peak, *under_way, below=-other),
            rows(ones(once), below=1.0, above=1.0),
        ]
        if apart:
            cells = [(row, column) for row, columns in enumerate(apart) for column in columns]
            most_of = np.array([len(columns) - 1.0 for columns in apart])
            constraints.append(rows(ones(cells), below=most_of))
        if together := self._together():
            row = csr_array(np.vstack([np.eye(n)[a] - np.eye(n)[b] for a, b in together]))
            constraints.append(rows(row, below=0.0, above=0.0))
        if link is None:
            constraints.append(rows(np.append(added, [0.0, -1.0])[None, :], below=0.0))
        else:
            constraints += [LinearConstraint(*row) for row in link.rows()]
        tiny = 1e-4 / (1.0 + added.sum())  # of equal peaks, the fastest
        upper = np.concatenate([np.ones(n), [most, MS * limit_s]])
        cost = np.zeros(n_columns)
        cost[n : n + 2] = (1.0, tiny) if least_bytes else (0.0, 1.0)
        if math.isfinite(limit_s) and link is None:
            cost[:n] = OFF_PEAK * self._mean_bytes()
        lower, whole = np.zeros(n_columns), np.arange(n_columns) < n
        if link is not None:
            upper = np.append(upper, link.upper)

        relaxes = link is not None and n > FEW

        def best(lower: Any, upper: Any, whole: Any, limit_s: float = TIME_LIMIT_S) -> Any:
            gap = GAP_OVER_LINK if relaxes else GAP
            return milp(
                cost,
                constraints=constraints,
                integrality=whole,
                bounds=Bounds(lower, upper),
                options={"time_limit": limit_s, "mip_rel_gap": gap},
            ).x

        if like is not None:
            lower[:n] = upper[:n] = [self._is_of(like, v) for v in self._variables]
            x = best(lower, upper, np.zeros(n_columns))
            return None if x is None else self._plan(x)
        plans, bound = [], -math.inf
        if relaxes and (shares := best(lower, upper, np.zeros(n_columns))) is not None:
            decided = self._decided(shares[:n])
            low, high = lower.copy(), upper.copy()
            low[:n][decided] = high[:n][decided] = np.round(shares[:n][decided])
            plans, bound = [best(low, high, whole, FEWER_LIMIT_S)], (1 + FAR) * cost @ shares
        if not plans or plans[0] is None or cost @ plans[0] > bound:
            plans.append(best(lower, upper, whole))
        found = min((x for x in plans if x is not None), key=lambda x: cost @ x, default=None)
        return None if found is None else self._plan(found)

    def _is_of(self, plan: FitPlan, variable: _Variable) -> bool:
        decided = plan.decided.get(self._problem.saved[variable.index].names[0])
        return decided is not None and decided.action == variable.way.action

    def _decided(self, shares: NDArray[np.float64]) -> NDArray[np.bool_]:
        # [variables] whether the tensor has one way in the relaxation.
        owner = np.array([v.index for v in self._variables])
        several = owner[np.abs(shares - np.round(shares)) > WHOLE]
        return ~np.isin(owner, several)

    def _bytes(self) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
        # [rows, variables] and the others' [rows], in MiB, and the slot of each row. Without a
        # link, slots that repeat one before are left out; of moments, those at which no plan holds
        # more than at another one of their slot.
        problem = self._problem
        alone = problem.over_link is None
        found = [problem.bytes_of(v.index, v.way, moves=alone) for v in self._variables]
        values = np.array([*found, problem.other_bytes()]) / MIB
        if self._every_moment:
            kept, slot = _undominated(values.T, problem.slots)
            values = values[:, kept]
        else:
            values = thinned(values, problem.slots)
            values = np.unique(values, axis=1) if alone else values
            slot = np.arange(values.shape[1])
        return values[:-1].T, values[-1], slot

    def _mean_bytes(self) -> NDArray[np.float64]:
        # [variables] in MiB, over all moments.
        problem = self._problem
        return np.array([problem.bytes_of(v.index, v.way).mean() / MIB for v in self._variables])

    def _once(self) -> list[tuple[int, int]]:
        # (tensor, variable) where the variable decides about the tensor: one of them does.
        return [(v.index, column) for column, v in enumerate(self._variables)]

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
        n = len(self._variables)
        chosen = [v for v, value in zip(self._variables, x[:n], strict=True) if value > 0.5]
        ways = {v.index: v.way for v in chosen}
        if self._problem.over_link is None:
            return self._problem.plan(ways)
        waits, early = x[n + 2 : -N_LARGEST].reshape(N_BLOCKS, -1)[2:4]
        largest, passing = x[-N_LARGEST:]
        most = max(waits.max(), early.max()) + largest
        moves = Moves(int(MIB * most), MIB * passing, float(x[n + 1]) / MS)
        return self._problem.plan(ways, moves)


def _undominated(
    rows: NDArray[np.float64], starts: NDArray[np.intp]
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    # Of moments [moments, values], those that have a value above that of each other one of their
    # slot; and the slots.
    kept: list[int] = []
    at: list[int] = []
    for slot, (start, stop) in enumerate(itertools.pairwise([*starts, len(rows)])):
        for i in range(start, stop):
            alike = (rows[start:stop] == rows[i]).all(axis=1)
            above = (rows[start:stop] >= rows[i]).all(axis=1) & ~alike
            if not (above.any() or alike[: i - start].any()):
                kept.append(i)
                at.append(slot)
    return np.array(kept, np.intp), np.array(at, np.intp)
