"""Time over memory: the cost of each goal, predicted from one explored step: `Curve`.

Note [a curve is predicted]
~~~~~~~~~~~~~~~~~~~~~~~~~~~
Every point is a plan that the planner makes for its goal, from the problem and at the prices by
which it predicts the plan that is obeyed. Nothing but that plan is measured, and small plans are
predicted the least exactly (last_resort.py). Measured facts are used: the correction
of the goal's peaks (correction.py), and, where the smallest plans were obeyed in turn, which of
them is the smallest.
"""

from __future__ import annotations

import json
import math
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from cswap.advisor.live_costs import KEEP
from cswap.display import shown
from cswap.errors import ConfigError
from cswap.fit.solve import seconds_of, smallest, within_bytes
from cswap.report.curve import picture
from cswap.report.files import writing
from cswap.report.terminal import add_rows, as_csv, as_text, new_table
from cswap.schema.checks import Checks
from cswap.units import show_bytes

if TYPE_CHECKING:
    import os
    from collections import Counter
    from collections.abc import Iterable, Mapping

    from cswap.fit.correction import Correction
    from cswap.fit.goal import Goal
    from cswap.fit.problem import FitPlan, Problem

KIND: Final = "cswap curve"
VERSION: Final = 1

COLUMNS: Final = ("fit=", "peak", "time / plain", "added ms", "tensors", "")
FORMATS: Final = (".png", ".svg", ".json", ".csv")
MOST_GOALS: Final = 100

_CHECK: Final = Checks(ConfigError)


@dataclass(frozen=True, slots=True)
class Point:
    """A goal, and the plan that the planner makes for it.

    Attributes:
        goal_bytes: the goal, for ``fit=``.
        peak_bytes: predicted peak of a step by the plan, as `Goal.predicted_bytes`.
        added_s: predicted seconds that the plan adds to a step.
        slowdown: predicted, over the step without cswap.
        actions: of the plan: tensors by "keep", "remat" and codec.
        measured_bytes: peak of steps that obey the plan. None: nobody has measured it.
        measured_s: seconds of such a step; see `Goal.step_s`. None: likewise.
    """

    goal_bytes: int
    peak_bytes: int
    added_s: float
    slowdown: float
    actions: Counter[str]
    measured_bytes: int | None = None
    measured_s: float | None = None


@dataclass(frozen=True, slots=True)
class Curve:
    """Time over memory, predicted; prints as a table. See Note [a curve is predicted].

    Attributes:
        points: from the step in which everything stays to the smallest one. Each takes fewer bytes
            than the one before it, and more time.
        present: the plan that is obeyed. None of ``points`` where one of these is predicted to take
            neither more bytes nor more time.
        plain_s: seconds of a step without cswap; see `Goal.plain_s`.
        smallest_bytes: the smallest goal that was measured to be in reach; see
            `Goal.smallest_bytes`.
        measured_by: the meter of peaks, in words.
    """

    points: tuple[Point, ...]
    present: Point
    plain_s: float
    smallest_bytes: int | None
    measured_by: str

    @property
    def rows(self) -> tuple[Point, ...]:
        """All points, the largest first, and the present one wherever it lies."""
        others = [point for point in self.points if point is not self.present]
        return tuple(sorted([*others, self.present], key=lambda point: -point.peak_bytes))

    def __str__(self) -> str:
        table = new_table(*COLUMNS)
        add_rows(table, map(self._cells, self.rows))
        notes = [f"All is predicted that is not called measured. Peak: {self.measured_by}."]
        if self.smallest_bytes is not None:
            named = show_bytes(self.smallest_bytes, up=True)
            notes.append(f"Smallest goal that was measured to be in reach: {named}.")
        return "\n".join([as_text(table), *notes])

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write the points: a picture as PNG or SVG, or the figures as JSON or CSV.

        Args:
            path: whose suffix says which. An existing file is replaced.

        Raises:
            ConfigError: the suffix is none of these, or the file cannot be written.
            UnsupportedError: a picture needs matplotlib.
        """
        file = Path(path)
        kind = file.suffix.lower()
        if kind not in FORMATS:
            raise ConfigError(f"path={shown(str(file))}: must end with {', '.join(FORMATS)}.")
        points = [self._record(point) for point in self.rows]
        if kind == ".json":
            names = ("plain_s", "smallest_bytes", "measured_by")
            about = {"kind": KIND, "version": VERSION, **{n: getattr(self, n) for n in names}}
            made = (json.dumps({**about, "points": points}, indent=1) + "\n").encode()
        elif kind == ".csv":
            lines = [{**one, "actions": _ways(one["actions"])}.values() for one in points]
            cells = [["" if cell is None else str(cell) for cell in line] for line in lines]
            made = as_csv(points[0], cells).encode()
        else:
            at = [(point.peak_bytes, point.slowdown) for point in (*self.points, self.present)]
            made = picture(at[:-1], at[-1], self._measured(), kind[1:])
        with writing("path", str(file)):
            file.write_bytes(made)

    def _measured(self) -> tuple[int, float] | None:
        # Bytes and time over the plain step's, of the present plan.
        now = self.present
        if now.measured_bytes is None or now.measured_s is None:
            return None
        return now.measured_bytes, now.measured_s / self.plain_s

    def _cells(self, point: Point) -> tuple[str, ...]:
        now = "" if point is not self.present else "the present plan"
        if point.measured_bytes is not None:
            now += f", measured {show_bytes(point.measured_bytes)}"
        if point.measured_s is not None:
            now += f", {point.measured_s / self.plain_s:.2f} of the time"
        return (
            show_bytes(point.goal_bytes, up=True),
            show_bytes(point.peak_bytes),
            f"{point.slowdown:.2f}",
            f"{1e3 * point.added_s:.2f}",
            _ways(point.actions),
            now,
        )

    def _record(self, point: Point) -> dict[str, Any]:
        found = {field.name: getattr(point, field.name) for field in fields(point)}
        return {**found, "actions": dict(point.actions), "present": point is self.present}


def curve_of(
    problem: Problem,
    present: FitPlan,
    goal: Goal,
    correction: Correction,
    other: float,
    goals: int,
) -> Curve:
    """The curve of a step. See `InstallHandle.curve`.

    Args:
        problem: of the step, at the prices of the goal's predictions.
        present: the plan that is obeyed.
        goal: as it stands.
        correction: of its peaks.
        other: bytes that are no saved tensors', at every moment.
        goals: number of goals, the two ends among them.

    Raises:
        ConfigError: ``goals`` is no number of goals.
    """
    _CHECK.count("goals", goals, least=2, most=MOST_GOALS)
    plain_s, besides = goal.plain_s, float(problem.other_bytes().max())
    assert plain_s is not None  # explored steps have said it

    def limit_of(plan: FitPlan) -> int:
        return correction.limit(plan.peak_bytes, other, besides)

    def point(plan: FitPlan, limit: int) -> Point:
        peak = int(correction.predicted(plan, other))
        return Point(limit, peak, plan.added_s, 1 + plan.added_s / plain_s, plan.counts)

    kept = problem.plan(
        {i: w for i, one in enumerate(problem.saved) for w in one.ways if w.action == KEEP}
    )
    at, high = goal.asked_bytes or limit_of(present), limit_of(kept)
    if goal.phase == "unreachable" and goal.smallest_bytes is not None:
        low = at = goal.smallest_bytes  # measured: plans that are predicted to be smaller are not
        plans = [(kept, high)]
    else:
        least, *_ = smallest(problem)
        low, at = limit_of(least), min(at, high)
        seconds = seconds_of(problem, least)  # a greedy plan's own are without hidden copies
        plans = [(kept, high), (replace(least, added_s=seconds or least.added_s), low)]
    for limit in np.linspace(high, low, goals)[1:-1].astype(int).tolist():
        found = within_bytes(problem, correction.room(limit, other, besides))
        if found is not None:
            plans.append((found, limit))
    now = replace(point(present, at), measured_bytes=goal.measured_bytes, measured_s=goal.step_s)
    others = [point(*one) for one in plans if one[0].decided != present.decided]
    plain = now if kept.decided == present.decided else others[0]
    points = _undominated(plain, now, others)
    return Curve(points, now, plain_s, goal.smallest_bytes, goal.measured_by)


def _undominated(plain: Point, now: Point, others: Iterable[Point]) -> tuple[Point, ...]:
    # The plain step, and the points that no other one is below in bytes or in time.
    found, least_s = [], math.inf
    for point in sorted(
        [now, *others], key=lambda p: (p.peak_bytes, p.added_s, p is not now, p.goal_bytes)
    ):
        if point.added_s < least_s and point is not plain:
            found.append(point)
            least_s = point.added_s
    return plain, *(one for one in reversed(found) if one.peak_bytes < plain.peak_bytes)


def _ways(actions: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {name}" for name, count in sorted(actions.items()))
