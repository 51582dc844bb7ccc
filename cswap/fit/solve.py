"""Finds the plan of a goal: the least time within bytes, or the fewest bytes within a time.

Both are mixed-integer linear programs, solved by HiGHS (way_program.py), which stops near the best
plan and not at it. Up to `MOST_GREEDY` tensors, a greedy search (greedy.py) makes a plan, too, and
the better one is taken. Where HiGHS finds nothing, that is the greedy one.
"""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Final, NamedTuple, cast

from cswap.advisor.live_costs import KEEP
from cswap.fit.goal import most_bytes
from cswap.fit.greedy import Search, greedy
from cswap.fit.way_program import MOST_BYTES, WayProgram, worth

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.fit.problem import FitPlan, Problem
    from cswap.fit.saved import Saved, Way

MOST_GREEDY: Final = 200
"""Tensors up to which the greedy search takes about a second: it is Python, beside the training."""

NEAR: Final = 1.05
"""Bytes of a plan that is nearly as small as the smallest one, over the bytes of that."""


def load_solver() -> None:
    """Import HiGHS on this thread, and not on the one that makes plans.

    scipy adds filters of warnings for ever, and replaces all of them for moments. The filters are
    the program's: beside its training, such a moment could undo what the program does to them. Here
    scipy's are taken out one by one, because `warnings.catch_warnings` would forget those that
    another thread adds meanwhile.
    """
    before = list(warnings.filters)
    import scipy.optimize
    import scipy.sparse  # noqa: F401

    filters = cast("list[Any]", warnings.filters)
    for added in [one for one in filters if one not in before]:
        filters.remove(added)


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
    found = _with_copies(problem, plan)
    return None if found is None else found.added_s


def _with_copies(problem: Problem, plan: FitPlan) -> FitPlan | None:
    # The same ways, with copies that computation hides; None: nobody can say.
    program = WayProgram(problem, every_way=True)
    return program.solve(limit_bytes=MOST_BYTES, limit_s=math.inf, like=plan)


def within_bytes(problem: Problem, limit_bytes: float) -> FitPlan | None:
    """The plan that adds the least time and takes at most so many bytes; None: there is none.

    Args:
        problem: of a step.
        limit_bytes: at every moment.
    """
    # Copies that computation hides would cost the solver nothing.
    all_stay = problem.plan({i: _stays(one) for i, one in enumerate(problem.saved)})
    if all_stay.peak_bytes <= most_bytes(limit_bytes):
        return all_stay
    found = WayProgram(problem).within(limit_bytes)
    return _beside_greedy(problem, found, limit_bytes, math.inf, lambda plan: plan.added_s)


def _beside_greedy(
    problem: Problem,
    solver: FitPlan | None,
    limit_bytes: float,
    limit_s: float,
    cost: Callable[[FitPlan], float],
) -> FitPlan | None:
    # The better one of the solver's plan and the greedy search's; limit_bytes 0: as few as can be.
    if solver is not None and len(problem.saved) > MOST_GREEDY:
        return solver
    found = greedy(problem, limit_bytes, limit_s)
    if problem.over_link is not None:
        # It counts copies as if no computation hid them, and none as under way.
        found = _with_copies(problem, found) or found
    fits = not limit_bytes or found.peak_bytes <= most_bytes(limit_bytes)
    if solver is None:
        return found if fits else None
    if not fits or found.added_s > limit_s or problem.splits(found):  # parts of a storage
        return solver
    both = {"solver": solver, "greedy": found}
    figures = {name: (plan.peak_bytes, plan.added_s) for name, plan in both.items()}
    return replace(min(both.values(), key=cost), searches=figures)


def within_time(problem: Problem, limit_s: float) -> FitPlan:
    """The plan that takes the fewest bytes and adds at most so many seconds.

    Args:
        problem: of a step.
        limit_s: added to a step; `math.inf` gives the fewest bytes that there are.
    """
    off_peak = problem.over_link is None and math.isfinite(limit_s)

    def cost(plan: FitPlan) -> float:
        return worth(problem, plan) if off_peak else plan.peak_bytes

    found = WayProgram(problem).solve(limit_bytes=math.inf, limit_s=limit_s)
    best = _beside_greedy(problem, found, 0.0, limit_s, cost)
    assert best is not None  # where the solver has found nothing, the search has run
    return best


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
        best := WayProgram(problem).solve(limit_bytes=math.inf, limit_s=math.inf),
        None if best and len(problem.saved) > MOST_GREEDY else greedy(problem, 0.0, math.inf),
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
