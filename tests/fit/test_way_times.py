"""Plans that are made anew from the times that tensors took under the plan before."""

from __future__ import annotations

import pytest
import torch

from cswap.fit.controller import FitController
from cswap.fit.goal import TOLERANCE, Goal, most_bytes
from cswap.fit.goal_chooser import LOOK_EVERY
from cswap.fit.problem import Problem
from cswap.fit.saved import Decided, Key, Saved, Way
from cswap.fit.seen import LEAST_TIMED, SeenTensor, Step
from cswap.fit.way_times import RUNS, WayTimes
from tests.fit.test_goal import is_held
from tests.fit.test_solve import over_link

MIB = 1 << 20


def key(i):
    return Key(f"m{i}", torch.float32, 0)


def looked_step(n=3):
    step = Step(explored=False, looked=True)
    for i in range(n):
        step.seen[5, i] = SeenTensor([key(i)], MIB, born=i)
    return step


def decided(*actions):
    return {key(i): Decided(action, i, MIB) for i, action in enumerate(actions)}


def run(times, *seconds, position=0):
    for each in seconds:
        times.took.append((position, MIB, each))
        times.settle(Step(explored=False, looked=False), {})


def test_a_time_is_the_median_of_the_latest_steps_without_a_look():
    times = WayTimes()
    times.settle(looked_step(), decided("remat", "zvc", "keep"))
    run(times, *[0.1] * (LEAST_TIMED - 1))
    assert times.seconds(key(0), "remat") is None
    run(times, 0.3)
    assert times.seconds(key(0), "remat") == pytest.approx(0.1)
    run(times, *[0.5] * RUNS)
    assert times.seconds(key(0), "remat") == pytest.approx(0.5)
    assert times.seconds(key(0), "zvc") is None
    assert times.seconds(key(1), "zvc") is None


def test_times_of_looked_steps_of_other_sizes_and_of_other_plans_do_not_count():
    times = WayTimes()
    times.settle(looked_step(), decided("remat"))
    for _ in range(LEAST_TIMED):
        times.took.append((0, MIB, 0.1))
        times.settle(looked_step(), decided("remat"))
        times.took.append((0, MIB + 1, 0.1))
        times.settle(Step(explored=False, looked=False), {})
    times.took.append((0, MIB, 0.1))
    times.expect_others()
    run(times, *[0.1] * LEAST_TIMED)
    assert times.seconds(key(0), "remat") is None


def problem():
    def saved(i):
        ways = (
            Way("keep", MIB, 0.0),
            Way("remat", 0, 0.001 * (i + 1)),
            Way("zvc", MIB // 2, 0.002, in_step=i == 2),
        )
        return Saved((key(i),), MIB, ways, i, 9 - i, 9 - i)

    return Problem([saved(i) for i in range(3)])


def prices(problem, action):
    return [w.added_s for s in problem.saved for w in s.ways if w.action == action]


def test_ways_that_were_not_measured_grow_by_the_excess_of_their_kind():
    times = WayTimes()
    assert times.repriced(problem()) is None
    times.settle(looked_step(), decided("remat", "zvc", "keep"))
    run(times, *[0.004] * LEAST_TIMED)
    run(times, *[0.012] * LEAST_TIMED, position=1)
    found = times.repriced(problem())
    assert found is not None
    assert prices(found, "keep") == [0.0] * 3
    assert prices(found, "remat") == pytest.approx([0.004, 0.005, 0.006])
    assert prices(found, "zvc") == pytest.approx([0.012, 0.012, 0.002])  # the last: of its own kind
    plan = problem().plan(
        {0: Way("remat", 0, 9.0), 1: Way("zvc", 0, 9.0), 2: Way("keep", MIB, 9.0)}
    )
    assert found.added_s(plan) == pytest.approx(0.016)
    times.forget()
    assert times.repriced(problem()) is None


def test_on_a_gpu_the_times_of_a_kind_are_its_hosts():
    # Of four copies one waits for the device in each step; what is computed again takes longer.
    keep = Way("keep", MIB, 0.0)
    ways = (keep, *(Way(a, 0, 0.5, host_s=9.0) for a in ("raw", "zvc", "remat")))
    saved = [Saved((key(i),), MIB, ways, i, 19 - i, 19 - i) for i in range(6)]
    linked = Problem(saved, over_link(20))
    times = WayTimes()
    times.settle(looked_step(6), decided(*["raw"] * 4, "remat", "keep"))
    for position, seconds in enumerate((5.0, 0.1, 0.2, 0.2, 0.4)):
        run(times, *[seconds] * LEAST_TIMED, position=position)
    found = times.repriced(linked)
    assert found is not None
    for one in found.saved:
        host_s = {way.action: way.host_s for way in one.ways}
        assert host_s == {"keep": 0.0, "raw": 0.2, "zvc": 0.2, "remat": 0.4}
        assert [way.added_s for way in one.ways] == [0.0, 0.5, 0.5, 0.5]


@pytest.fixture
def slow(monkeypatch):
    """Seconds that a tensor takes in its hooks, by its action and its module's path."""
    monkeypatch.setattr("cswap.fit.controller.MOST_REPRICED", 3)
    costs: dict[str, float] = {}
    settle = WayTimes.settle

    def faked(self, step, decided):
        settle(self, step, decided)
        for (name, _), seconds in self._times.items():
            seconds.extend([costs.get(name.scope, 1e-4)] * len(seconds))

    monkeypatch.setattr(WayTimes, "settle", faked)
    return costs


def train(training, n):
    for _ in range(n):
        training.step()


def seeded(training):
    torch.manual_seed(0)
    return training.step()


def chosen(handle):
    plan = handle.engine._state.goal.decided
    return {name.scope: one.action for name, one in plan.items() if one.action != "keep"}


def test_tensors_that_take_longer_than_foretold_stay(make_training, sizes, install, slow):
    training, plain = make_training("blocks"), make_training("blocks")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.75 * saved))
    train(training, 10)
    first = chosen(handle)
    slowest = next(iter(first))
    slow[slowest] = 1.0
    train(training, 3 * LOOK_EVERY)
    assert slowest not in chosen(handle)
    assert handle.goal.plans > 1
    assert is_held(training, handle)
    plain.model.load_state_dict(training.model.state_dict())
    for mine, its in zip(seeded(training), seeded(plain), strict=True):
        assert torch.equal(mine, its)


@pytest.fixture
def slow_from_now_on(make_training, sizes, install, slow):
    """A training under a goal, its handle, and its first plan, whose tensors are slow then."""

    def make():
        training = make_training("blocks")
        resident, saved = sizes(training)
        handle = install(training.model, fit=int(resident + 0.75 * saved))
        train(training, 10)
        first = chosen(handle)
        slow.update(dict.fromkeys(first, 0.01))
        return training, handle, first

    return make


def test_the_fastest_plan_is_obeyed_at_last(slow_from_now_on, slow):
    # Whatever a new plan takes turns out to be slow.
    training, handle, first = slow_from_now_on()
    seen: list[bool] = []
    for _ in range(6 * LOOK_EVERY):
        training.step()
        now = chosen(handle)
        slow.update({scope: 1.0 for scope in now if scope not in first})
        seen.append(now)
    assert any(now != first for now in seen)
    assert seen[-1] == first
    assert seen[-2 * LOOK_EVERY :] == [first] * (2 * LOOK_EVERY)


def test_a_plan_of_measured_times_that_is_above_the_limit_gives_way(slow_from_now_on, monkeypatch):
    training, handle, first = slow_from_now_on()
    keep_limit = FitController._keep_limit
    plans: list[dict[str, str]] = []

    def above(self, limit_bytes, plan, *, looked):
        now = chosen(handle)
        if not plans or now != plans[-1]:
            plans.append(now)
        if now != first:
            self._measured = int(1.001 * limit_bytes)
        keep_limit(self, limit_bytes, plan, looked=looked)

    monkeypatch.setattr(FitController, "_keep_limit", above)
    train(training, 6 * LOOK_EVERY)
    others = [plan for plan in plans if plan != first]
    assert len(others) == 2  # one more is tried
    assert plans[-1] == chosen(handle) == first


def test_the_predicted_slowdown_follows_the_measured_times(make_training, sizes, install, slow):
    training = make_training("blocks")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.5 * saved))
    train(training, 10)
    before = handle.goal.predicted_slowdown
    slow.update(dict.fromkeys([name for name, _ in training.model.named_modules()], 0.5))
    train(training, 5 * LOOK_EVERY)
    goal = handle.goal
    n = sum(count for action, count in goal.actions.items() if action != "keep")
    assert before is not None
    assert goal.predicted_slowdown is not None
    assert goal.plain_s is not None
    assert goal.predicted_slowdown > before
    assert goal.predicted_slowdown == pytest.approx(1 + n * 0.5 / goal.plain_s, rel=1e-6)


def test_a_peak_above_the_limit_by_the_solvers_tolerance_is_within_it():
    limit = 10**10
    assert most_bytes(limit) == limit + 10**10 * TOLERANCE
    for measured, held in ((limit + 10**5, True), (limit + 10**5 + 1, False)):
        goal = Goal(limit, None, "obeying", measured_bytes=measured)
        assert goal.held is held
