"""Holds a memory goal: explores, plans, obeys, measures, corrects. It acts between two steps.

Note [phases]
~~~~~~~~~~~~~
compiling   on a machine's first use, as long as another process compiles the kernels: steps without
            cswap, if nobody has asked for a goal (first_use.py).
exploring   `EXPLORED` steps with each tensor in its smallest form (exploration.py).
timing      two steps without cswap, and one with marks, on a GPU that has memory for them
            (plain_steps.py). With a limit of bytes, the allocator gives back its blocks after them.
            Without one, two run again before a plan is made because steps take too long, or less
            than they may.
planning    as exploring, until a thread beside the training has made the plan (solve.py).
obeying     the plan; each step is measured, and the next plan corrected by that (correction.py). A
            step of other tensors (drift) is explored again; if its tensors are larger, the next
            plan is made for that size, so it is for the fullest step. When the tensors' times have
            been measured under the plan (way_times.py), another plan is made with these, and obeyed
            if it takes less time. At most `MOST_REPRICED` times. In the end, or if such a plan
            turns out to be above the limit, the plan that took the least time is obeyed.
            Where no plan holds the limit, the smallest ones are obeyed in turn; if none does, an
            error names the least that was measured (last_resort.py).
changing    the same, where the steps have drifted from `MOST_DRIFTS` plans: what they save depends
            on data. The last plan decides about the tensors that it knows, and the others are held
            in their smallest way. Nothing is explored any more.

Note [a step that does not fit]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The goal of a model for which nobody has asked is the least memory at a multiple of the time without
cswap. Where a GPU has no memory for such a step, that time can only be guessed, and a plan within
it may not fit either. So the goal is the device's memory then, until steps are explored again.

Note [bytes that a limit leaves for saved tensors]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A plan's limit is the goal, less the bytes of a step that are no saved tensors' (``other``), less
the excess of measured over predicted peaks so far (correction.py).
"""

from __future__ import annotations

import math
import weakref
from collections import Counter
from dataclasses import replace
from typing import TYPE_CHECKING, Final

import torch

from cswap.devices.stopwatch import stopwatch_of
from cswap.errors import ConfigError, GoalError
from cswap.fit.background import Background
from cswap.fit.correction import COUNTED_MARGIN, MARGIN, Correction, Look
from cswap.fit.curve import curve_of
from cswap.fit.drift import DRIFT, Drift
from cswap.fit.exploration import EXPLORED, Exploration
from cswap.fit.first_use import FirstUse
from cswap.fit.goal import Asked, Goal, Phase, most_bytes
from cswap.fit.goal_chooser import LOOK_EVERY, GoalChooser
from cswap.fit.last_resort import LastResort, reachable
from cswap.fit.link_rates import link_rates
from cswap.fit.pace import Pace
from cswap.fit.plain_steps import PlainSteps
from cswap.fit.plan_costs import PlanCosts
from cswap.fit.resident import Resident, meter_for
from cswap.fit.schedule import Schedule, made_for
from cswap.fit.solve import found_for, load_solver, smallest
from cswap.fit.used_bytes import UsedBytes
from cswap.fit.whole_device import device_of, usable_bytes
from cswap.log import log
from cswap.units import show_bytes

if TYPE_CHECKING:
    from cswap.engine.engine import SwapEngine
    from cswap.fit.curve import Curve
    from cswap.fit.problem import FitPlan, Problem
    from cswap.fit.seen import Step
    from cswap.fit.solve import Found

MOST_WAITED: Final = 3
"""Forwards without a backward before the next one, without a step of one forward between them,
after which nobody holds a goal by default."""

SETTLING: Final = 1
"""Steps after a change of plan whose peak does not count: half of it is of the plan before."""

MOST_DRIFTS: Final = 3
"""Explorations because of drift, after which no plan is taken to know all steps."""

_OBEYS: Final = ("obeying", "changing")
"""Phases in which a plan decides."""

MOST_REPRICED: Final = 3
"""Plans whose tensors are timed, so that plans come to rest."""

MOST_OVER_LINK: Final = 2
"""The same over a link, looser plans among them: predictions tell such plans hardly apart."""

GAIN: Final = 0.002
"""Share of a plain step that another plan has to save: a change costs steps that are looked at."""

GAIN_OVER_LINK: Final = 0.01
"""The same where that is predicted: of two plans over a link, the faster one is not told apart."""


class FitController:
    """Holds the goal of one installed model, until `remove`.

    Attributes:
        used: counts the tensors that second forwards save.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        engine: SwapEngine,
        asked: Asked,
        schedule: Schedule | None = None,
    ) -> None:
        """Begin with the next step.

        Args:
            model: whose forward is a step.
            engine: that swaps for it.
            asked: the goal.
            schedule: is obeyed from the first step on, if it was made for this goal.

        Raises:
            ConfigError: the model is on several devices, or on one whose memory is no goal.
            GoalError: the limit is below the bytes of parameters, buffers and gradients.
        """
        device = device_of(model)
        self._asked = self._first_asked = asked = asked.on(device)
        # This may fail: nothing is to be undone yet.
        link = link_rates(device.index or 0) if device.type == "cuda" else None
        watch = stopwatch_of(device)
        self._model, self._engine, self._device = weakref.ref(model), engine, device
        self._resident = Resident(model)
        if not asked.of_device:
            _check_floor(asked.limit_bytes, self._resident)
        self._meter = meter_for(device, self._resident)
        self.used = UsedBytes(engine.counters)
        self._chooser = GoalChooser(
            self._begin_step, self.used, engine, watch, link, self._meter.lap
        )
        self._phase: Phase = "exploring"
        self._exploration: Exploration | None = None
        self._problem: Problem | None = None
        self._planning: Background[tuple[Found, Problem]] | None = None
        self._plan: FitPlan | None = None
        self._smallest_bytes: int | None = None
        self._last_resort: LastResort | None = None
        self._plans = self._since = self._repriced = self._drifts = self._waited = 0
        self._waits = False  # the step that runs has several forwards
        self._compares = False  # the plan that is being made with the one that is obeyed
        self._other = 0.0
        self._resident_then = 0  # when that was measured
        self._margin = MARGIN if device.type == "cuda" else COUNTED_MARGIN
        self._correction = Correction(self._margin)
        self._most_repriced = MOST_REPRICED if link is None else MOST_OVER_LINK
        self._pace = Pace("cuda" if device.type == "cuda" else "cpu")
        self._plain = PlainSteps(engine, self._pace, watch)
        self._costs = PlanCosts(self._chooser, self._pace)
        load_solver()
        self._measured: int | None = None
        self._drift = Drift()
        self._explore()
        engine.choose_by(self._chooser)
        self._first_use = FirstUse(engine)
        if schedule is not None:
            self._begin_with(schedule)
        elif (
            asked.by_default
            and device.type == "cpu"
            and not engine.advisor.may_use_lossy
            and self._first_use.begin(model)
        ):
            self._phase = "compiling"

    @property
    def schedule(self) -> Schedule | None:
        """The plan that is obeyed, to be saved; None: there is none yet."""
        if self._plan is None or self._phase not in _OBEYS:
            return None
        made = made_for(self._asked, self._device.type, self._engine.config)
        return Schedule(made, self._plan, int(self._other), self._pace.plain_s)

    @property
    def goal(self) -> Goal:
        """The goal as it stands."""
        plan, plain_s = self._plan, self._pace.plain_s
        slower = None
        if plan is not None and plain_s:
            measured_s = self._costs.obeyed_s
            added_s = plan.added_s if measured_s is None else measured_s
            slower = 1 + added_s / plain_s
        return Goal(
            self._asked.limit_bytes,
            self._asked.slowdown,
            self._phase,
            predicted_bytes=None
            if plan is None
            else int(self._correction.predicted(plan, self._other)),
            measured_bytes=self._measured,
            measured_by=self._meter.by,
            resident_bytes=self._resident.nbytes,
            smallest_bytes=self._smallest_bytes,
            plain_s=plain_s,
            predicted_slowdown=slower,
            step_s=self._pace.step_s,
            plans=self._plans,
            actions=Counter() if plan is None else plan.counts,
        )

    def largest_batch(self) -> float | None:
        """See `InstallHandle.largest_batch`."""
        limit, problem = self._asked.limit_bytes, self._problem
        if limit is None or problem is None:
            return None
        plans = smallest(self._costs.repriced(problem))
        other = max(0.0, self._other - self._resident_then)
        growing = min(plan.peak_bytes for plan in plans) + other
        return max(0.0, self._correction.room(limit, self._resident.nbytes)) / max(1.0, growing)

    def curve(self, goals: int) -> Curve:
        """See `InstallHandle.curve`."""
        plan, problem, measured_s = self._plan, self._costs.priced, self._costs.obeyed_s
        if plan is None or problem is None:
            raise ConfigError(
                f"curve: there is no plan of explored steps (phase {self._phase!r}). Remedy: "
                f"without schedule=, train {2 * EXPLORED} steps, and more until the plan is made. "
                "If the goal was given up, the log says why."
            )
        if measured_s is not None and self._chooser.unified:  # else that is of whole steps
            plan = replace(plan, added_s=measured_s)
        return curve_of(problem, plan, self.goal, self._correction, self._other, goals)

    def remove(self) -> None:
        """Let go of the model; the engine's advisor decides again."""
        self._first_use.end()
        self._engine.choose_by(None)
        self._engine.plan_copies(0)
        self._plain.end()
        self._resident.remove()
        self.used.forget()

    # -------------------------------------------------------------------- steps

    def _begin_step(self) -> None:
        if self._model() is None or torch.compiler.is_compiling():
            return
        chooser, step = self._chooser, self._chooser.step
        if not chooser.is_on or self._first_use.goes_on:
            chooser.skip()
            return
        if self._phase == "compiling":
            self._phase = "exploring"
        evaluates = not torch.is_grad_enabled()
        if step.began is not None:
            if evaluates and step.waits:
                return
            chooser.end_step()
            self.used.settle()
            if step.waits:  # the next forward belongs to the same step
                self._wait()
                return
            self._end(step)
            if self._phase == "given up":
                return
        if evaluates:  # it may take gradients inside, which are of no step
            chooser.skip()
        else:
            chooser.look()

    def _wait(self) -> None:
        # A forward has begun before the backward of the last one.
        self._chooser.several_forwards = self._waits = True
        self._waited += 1
        if self._asked.by_default and self._waited >= MOST_WAITED:
            self._give_up("several forwards come before a backward")

    def _end(self, step: Step) -> None:
        self._note(step)
        if self._phase == "timing" or self._plain.run:
            if self._plain.note(step):
                self._end_timing()
        elif self._phase in ("exploring", "planning"):
            self._go_on_exploring(step)
        elif self._phase in _OBEYS:
            self._look_back(step)
        elif self._asked.of_device:  # unreachable, which was no error
            self._explore_if_drifted(step)

    def _note(self, step: Step) -> None:
        # The memory and the time of a step that has ended.
        saved, total = self._engine.counters.take_peak(), None
        if step.explored or not self._asked.by_default:  # a user may have a meter, too
            total = self._meter.take(saved + step.small_bytes)
        if not step.n_uses:
            return
        if not self._waits:
            self._waited, self._chooser.several_forwards = 0, False
        self._waits = False
        self._since += 1
        self._pace.note(step, obeys=self._phase in _OBEYS)
        if total is None:
            return
        if step.explored:
            self._resident_then = self._resident.nbytes
            if self._chooser.unified:
                self._other = float(max(0, total - saved) + self.used.most_bytes)
            else:
                other = step.other_bytes()
                self._other = float(other.min()) if len(other) else 0.0
            self._measured = total
            if self._since > SETTLING:  # the first one holds tensors that trials have made
                fullest = self._smallest_bytes or 0
                self._smallest_bytes = max(fullest, reachable(total, self._other))
        elif self._since > SETTLING and (step.looked or not self._chooser.unified):
            # On a CPU, bytes are known of tensors that were looked at.
            self._measured = max(self._measured or 0, total)

    def _go_on_exploring(self, step: Step) -> None:
        if step.stranger:
            self._give_up("several threads save tensors of this model")
            return
        if step.n_uses and self._exploration is not None:
            self._exploration.add(step, self._room())
            if self._asked.by_default and self._exploration.n_empty >= EXPLORED:
                self._give_up("no tensor can be held otherwise")
                return
            self._pose(self._exploration)
        if self._planning is not None and self._planning.done:
            self._take_plan()
        elif self._exploration is None and self._planning is None and self._phase == "planning":
            self._begin_planning()  # something was raised where it was to begin

    def _look_back(self, step: Step) -> None:
        # On a step that obeyed the plan.
        plan = self._plan
        if step.stranger:
            self._give_up("several threads save tensors of this model")
        if plan is None or not step.n_uses or self._phase not in _OBEYS:
            return
        if self._planning is not None:
            if self._planning.done:
                self._take_plan()
            return
        if self._since <= SETTLING:
            return
        if self._explore_if_drifted(step) or self._plan_for_larger(step, plan):
            return
        if self._asked.limit_bytes is None:
            self._keep_pace()
        elif step.looked or not self._chooser.unified:
            self._keep_limit(self._asked.limit_bytes, plan, looked=step.looked)
        if step.looked:
            self._reprice(plan)

    def _explore_if_drifted(self, step: Step) -> bool:
        # Whether the step has drifted from the plan, and that is no habit.
        plan = self._plan
        if plan is None or not step.looked or self._phase == "changing":
            return False
        drifted = self._drift.in_step(step, plan)
        if drifted and self._since >= LOOK_EVERY:
            self._drifts += 1
            if self._drifts > MOST_DRIFTS:
                self._phase = "changing"
                say = log.info if self._asked.by_default else log.warning
                say(
                    "fit: steps save other tensors again and again. The goal is held as far as the "
                    "last plan goes; handle.goal says whether it is."
                )
            else:
                log.info("fit: the step has changed; it is explored again.")
                self._explore()
        return drifted

    def _plan_for_larger(self, step: Step, plan: FitPlan) -> bool:
        # Tensors have grown beyond the plan: whether another one is made for the new sizes.
        more = sum(step.grown.values()) > DRIFT * max(plan.raw_bytes, 1)
        if more and self._problem is None:
            self._explore()
        elif more and self._problem is not None:
            self._correction.forget_held()
            before = sum(one.nbytes for one in self._problem.saved)
            self._problem, self._smallest_bytes = self._problem.grown(step.grown), None
            self._pace.grow(sum(one.nbytes for one in self._problem.saved) / before)
            self._begin_planning()
        return more

    # -------------------------------------------------------------- corrections

    def _keep_limit(self, limit_bytes: int, plan: FitPlan, *, looked: bool) -> None:
        if self._measured is None:
            return
        if not self._chooser.unified and self._since <= self._chooser.first_looks + SETTLING:
            return  # looks hold other memory than the steps between them
        look = Look(plan, self._measured, limit_bytes, self._other, self._besides)
        over = look.measured > most_bytes(limit_bytes)
        if not over and not looked:  # later steps may hold more
            return
        if not over and self._smallest_bytes is not None:
            self._smallest_bytes = min(self._smallest_bytes, limit_bytes)
        if self._last_resort is not None:
            self._last_resort.note(plan, look.measured)
        if over and self._last_resort is not None:
            self._obey_smaller(self._last_resort, limit_bytes)
        elif over:
            self._correction.too_much(look)
            self._go_back_or_plan()
        elif (
            self._problem is not None
            and self._since > SETTLING + 1
            and (self._chooser.unified or self._pace.step_s is not None)
            and self._correction.may_loosen(look)
        ):
            if self._costs.note(plan, self._problem):  # else no tensor has been timed on this CPU
                # The next plan is obeyed if it takes less time.
                self._compares = True
                self._costs.measure(plan, self._problem)
            self._begin_planning()

    def _obey_smaller(self, resort: LastResort, limit_bytes: int) -> None:
        # One of the smallest plans is above the limit.
        plan = resort.next()
        if plan is not None:
            self._obey(plan)
        elif self._phase != "changing":  # in which a step may fit again
            plan, measured = resort.smallest
            if plan is not self._plan:
                self._obey(plan)
            self._say_unreachable(limit_bytes, measured)

    def _go_back_or_plan(self) -> None:
        # After a plan above the limit: to the fastest one that has held it. Another one is made
        # where there is none, and once besides: it is obeyed if it takes less time.
        best = min(self._correction.held, key=self._cost_s, default=None)
        if best is None:
            self._begin_planning()
            return
        self._obey(best, self._costs.measure(best, self._explored_problem))
        self._compares = self._correction.go_back()
        if self._compares:
            self._begin_planning()
        else:
            self._repriced = self._most_repriced

    def _reprice(self, plan: FitPlan) -> None:
        # See Note [prices from steps that obey] in way_times.py. A first round of looks is over.
        if self._since <= LOOK_EVERY or self._repriced >= self._most_repriced:
            return
        if self._planning is not None or self._last_resort is not None or self._problem is None:
            return
        if not self._costs.note(plan, self._problem):
            return
        self._repriced += 1
        measured_s = self._costs.measure(plan, self._problem)
        if self._asked.limit_bytes is None:
            return  # measured steps say how much time is left
        held = self._correction.held
        n_timed = max(self._repriced, 0 if self._chooser.unified else len(held))
        if n_timed < self._most_repriced:
            self._compares = True
            self._begin_planning()
            return
        self._repriced = self._most_repriced
        best = min(held, key=self._cost_s, default=plan)
        if self._is_better(best, measured_s, self._cost_s(best)):
            self._obey(best, self._cost_s(best))

    def _cost_s(self, plan: FitPlan) -> float:
        return self._costs.of(plan, self._explored_problem)

    @property
    def _explored_problem(self) -> Problem:
        assert self._problem is not None  # a plan has been made
        return self._problem

    # -------------------------------------------------------------------- plans

    def _begin_with(self, schedule: Schedule) -> None:
        # Where a plan from a file has to be another one, steps are explored for it.
        config, kind = self._engine.config, self._device.type
        other = schedule.other_than(made_for(self._asked, kind, config))
        if other is not None and self._asked.by_default and kind == "cuda":
            of_device = _of_device(usable_bytes(self._device))
            if schedule.other_than(made_for(of_device, kind, config)) is None:
                self._asked, other = of_device, None  # see Note [a step that does not fit]
        if other is not None:
            log.warning("schedule: it was made for %s. Steps are explored.", other)
            return
        self._exploration, self._other = None, float(schedule.other_bytes)
        self._pace.plain_s, self._pace.share = schedule.plain_s, 1.0  # until steps say it anew
        self._obey(schedule.plan)

    def _explore(self) -> None:
        self._asked = self._first_asked
        self._engine.renumber()
        self._engine.plan_copies(0, spares=True)
        self._phase, self._since = "exploring", 0
        self._pace.explore()
        self._correction = Correction(self._margin)
        self.used.most_bytes = 0
        self._planning, self._repriced, self._smallest_bytes = None, 0, None
        self._compares = False
        self._costs.forget()
        self._exploration = Exploration(self._chooser)

    def _pose(self, exploration: Exploration) -> None:
        problem, explored = exploration.problem, exploration.fullest
        if problem is None or explored is None:
            return
        self._problem = problem
        self._pace.plain_s, self._pace.was_plain = exploration.plain_s, False
        self._exploration, self._phase = None, "planning"
        if problem.over_link is None or self._chooser.several_forwards:
            self._begin_planning()
            return
        usable = self._asked.limit_bytes if self._asked.of_device else None
        if usable is None:
            usable = usable_bytes(self._device)
        if self._plain.begin(problem.raw_peak_bytes + self._other, usable, explored):
            self._phase = "timing"
            return
        if self._asked.by_default:  # see Note [a step that does not fit]
            self._asked = _of_device(usable)
            log.info("fit: without cswap, a step does not fit the device: its memory is the goal.")
        self._begin_planning()

    def _keep_pace(self) -> None:
        if self._pace.changes(self._asked.slowdown or 1.0, self._time_plain):
            self._begin_planning()

    def _time_plain(self) -> bool:
        # Plain steps run again, and then the plan goes on.
        problem, usable = self._problem, usable_bytes(self._device)
        return problem is not None and self._plain.begin(
            problem.raw_peak_bytes + self._other, usable
        )

    def _end_timing(self) -> None:
        if self._phase != "timing":
            self._pace.plain_again()
            self._keep_pace()
            return
        self._phase = "planning"
        if self._problem is not None and self._plain.times is not None:
            self._problem = self._problem.timed_by(self._plain.times)
        if self._asked.limit_bytes is not None:
            torch.cuda.empty_cache()
        self._begin_planning()

    def _room(self) -> float:
        # Bytes that the goal leaves for saved tensors.
        limit = self._asked.limit_bytes
        if limit is None:
            return math.inf
        return self._correction.room(limit, self._other, self._besides)

    @property
    def _besides(self) -> float:
        # Most bytes that the program holds at a moment, beyond those that it holds at all of them.
        if self._problem is None or self._exploration is not None:
            return 0.0
        return float(self._problem.other_bytes().max())

    def _begin_planning(self) -> None:
        problem, room, limit_s = self._problem, self._room(), math.inf
        if self._planning is not None:
            return
        if problem is None:
            if self._phase in _OBEYS:
                self._explore()
            return
        if self._asked.limit_bytes is None:
            limit_s = self._pace.allowed_s(self._asked.slowdown or 1.0)
        if self._asked.limit_bytes is not None or not self._chooser.unified:
            problem = self._costs.repriced(problem)
        problem, obeyed = problem.taking(self._pace.plain_s), self._plan if self._compares else None
        self._planning = Background(lambda: (found_for(problem, room, limit_s, obeyed), problem))

    def _take_plan(self) -> None:
        assert self._planning is not None  # it is done
        planning, self._planning = self._planning, None
        try:
            found, problem = planning.result()
        except Exception as error:
            self._give_up(f"no plan could be made ({error})")
            return
        compares, self._compares = self._compares, False
        if compares:
            before_s = self._costs.obeyed_s if found.obeyed_s is None else found.obeyed_s
            gain = GAIN if self._chooser.unified else GAIN_OVER_LINK
            if found.plan is None or not self._is_better(
                found.plan, before_s, found.plan.added_s, gain
            ):
                return
        self._plans, self._costs.priced = self._plans + 1, problem
        plan, self._last_resort = found.plan, None
        if plan is None:
            plan, *others = found.smallest
            self._last_resort = LastResort(others)
        self._obey(plan)

    def _is_better(
        self, plan: FitPlan, before_s: float | None, added_s: float, gain: float = GAIN
    ) -> bool:
        # Than the plan that is obeyed, which holds the limit, and adds so many seconds.
        if self._plan is None or before_s is None or plan.decided == self._plan.decided:
            return False
        return before_s - added_s > gain * (self._pace.plain_s or 0.0)

    def _obey(self, plan: FitPlan, measured_s: float | None = None) -> None:
        if self._phase != "changing":
            self._phase = "obeying"
        self._plan, self._since, self._measured = plan, 0, None
        self._drift.begin_plan()
        self._pace.begin_plan(plan.added_s)
        self._costs.obeyed_s = measured_s
        self._chooser.obey(plan.decided)
        self._engine.plan_copies(plan.under_way_bytes)
        self._engine.renumber()  # tensors that stay have no position
        log.info("fit: %s", self.goal)

    def _say_unreachable(self, limit_bytes: int, measured: int) -> None:
        self._phase, self._measured = "unreachable", measured
        self._smallest_bytes = smallest = reachable(measured, self._other)
        others = f"{show_bytes(self._other)} of it for what is no saved tensor."
        if not self._engine.config.recompute:
            others += " Modules that are run again hold less: recompute=(...) names them."
        if self._asked.of_device:  # steps go on: that much fits, if barely
            takes, has = show_bytes(measured), show_bytes(limit_bytes)
            log.warning("fit: a step takes %s, %s The device has %s for it.", takes, others, has)
            return
        why = f'the smallest goal that can be reached is fit="{show_bytes(smallest, up=True)}"'
        raise GoalError(limit_bytes, smallest, f"{why}, {others}")

    def _give_up(self, why: str) -> None:
        say = log.info if self._asked.by_default else log.warning
        say("fit: %s; cswap decides as without a goal from here on.", why)
        self._phase, self._costs.priced = "given up", None
        self.remove()


def _of_device(usable: int) -> Asked:
    # The goal of a device with so many bytes.
    return Asked(usable, None, of_device=True)


def _check_floor(limit_bytes: int | None, resident: Resident) -> None:
    floor = resident.nbytes
    if limit_bytes is not None and limit_bytes <= floor:
        resident.remove()
        raise GoalError(
            limit_bytes,
            floor + 1,
            f"parameters, buffers and gradients alone take {show_bytes(floor, up=True)}. Ask for "
            "more.",
        )
