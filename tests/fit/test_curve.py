"""The curve of time over memory: its points, its agreement with the goal, its files."""

from __future__ import annotations

import copy
import csv
import itertools
import json
import sys
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
import torch

from cswap.errors import ConfigError, GoalError
from cswap.fit.correction import COUNTED_MARGIN, Correction
from cswap.fit.curve import Point, curve_of
from cswap.fit.goal import Goal
from cswap.fit.solve import seconds_of, smallest, within_bytes
from cswap.report.figure import new_figure
from cswap.units import show_bytes
from tests.fit import test_goal_over_a_link as over_a_link
from tests.fit.test_goal import STEPS
from tests.fit.test_goal_over_a_link import machine
from tests.fit.test_solve import random_problem

__all__ = ["machine"]

OTHER = 1e6


def a_goal(**fields):
    return Goal(None, 1.1, fields.pop("phase", "obeying"), plain_s=0.5, **fields)


def ways_kept(problem):
    return {i: w for i, s in enumerate(problem.saved) for w in s.ways if w.action == "keep"}


def assert_is_a_curve(curve):
    assert len(curve.points) >= 3
    for above, below in itertools.pairwise(curve.points):
        assert above.peak_bytes > below.peak_bytes
        assert above.added_s < below.added_s
        assert above.goal_bytes > below.goal_bytes
    for point in curve.rows:
        assert point.slowdown == 1 + point.added_s / curve.plain_s
    assert curve.points[0].added_s == 0
    assert set(curve.points[0].actions) == {"keep"}
    assert curve.present in curve.rows


def assert_agrees(curve, goal):
    now = curve.present
    assert now.peak_bytes == goal.predicted_bytes
    assert now.slowdown == goal.predicted_slowdown
    assert now.actions == goal.actions
    assert (now.measured_bytes, now.measured_s) == (goal.measured_bytes, goal.step_s)
    others = (point for point in curve.points if point is not now)
    assert all(point.measured_bytes is point.measured_s is None for point in others)


@pytest.mark.parametrize(("linked", "bias"), [(False, 0.0), (False, 5e5), (True, 5e5)])
def test_each_goal_has_the_plan_that_the_planner_makes_for_it(linked, bias):
    problem, correction = random_problem(3, 6 if linked else 8, linked=linked), Correction(0.02)
    correction.bias = bias
    besides = float(problem.other_bytes().max())
    kept = problem.plan(ways_kept(problem))
    found = curve_of(problem, kept, a_goal(), correction, OTHER, 5)
    assert_is_a_curve(found)
    assert found.present is found.points[0]
    for point in found.points[1:-1]:
        plan = within_bytes(problem, correction.room(point.goal_bytes, OTHER, besides))
        assert plan is not None
        assert (point.peak_bytes, point.added_s) == (plan.peak_bytes + OTHER + bias, plan.added_s)
        assert point.actions == plan.counts
        assert point.peak_bytes <= point.goal_bytes
    first, last = found.points[0], found.points[-1]
    assert first.peak_bytes == problem.raw_peak_bytes + OTHER + bias
    least = smallest(problem)[0]
    assert (last.peak_bytes, last.added_s) == (
        least.peak_bytes + OTHER + bias,
        seconds_of(problem, least),
    )
    for point in (first, last):  # the smallest goals that leave so much room
        need = point.peak_bytes - OTHER - bias
        assert correction.room(point.goal_bytes, OTHER, besides) >= need
        assert correction.room(point.goal_bytes - 2, OTHER, besides) < need


@pytest.mark.parametrize("besides", [0.0, 300.0, 900.0])
def test_a_limit_is_the_room_the_other_way_round(besides):
    correction = Correction(COUNTED_MARGIN)
    correction.bias = -20.0
    for room in (100.0, 280.0, 500.0, 1e9):
        limit = correction.limit(room, 200.0, besides)
        assert room <= correction.room(limit, 200.0, besides) < room + 1


def test_a_present_plan_that_another_one_beats_is_shown_beside_the_curve():
    problem, correction = random_problem(3, 8), Correction(0.02)
    plan = replace(smallest(problem)[0], decided={}, added_s=9.0, counts=Counter({"odd": 1}))
    found = curve_of(problem, plan, a_goal(measured_bytes=7, step_s=1.25), correction, OTHER, 5)
    assert_is_a_curve(found)
    assert found.present not in found.points
    assert found.rows[-1] is found.present or found.rows[-2] is found.present
    (row,) = (line for line in str(found).splitlines() if "1 odd" in line)
    assert row.endswith(" the present plan, measured 7 B, 2.50 of the time")


def test_a_plan_that_is_made_again_is_the_present_one():
    problem = random_problem(3, 8)
    plan = smallest(problem)[0]
    present = replace(plan, added_s=plan.added_s + 1e-3)  # the solver has ended a bit elsewhere
    found = curve_of(problem, present, a_goal(), Correction(0.02), OTHER, 5)
    assert_is_a_curve(found)
    assert found.present is found.points[-1]


def test_the_present_goal_is_the_one_asked_for_or_all_that_a_step_takes():
    problem, correction = random_problem(3, 8), Correction(0.0)
    kept = problem.plan(ways_kept(problem))
    most = problem.raw_peak_bytes + int(OTHER)
    for asked, shown in ((None, most), (1 << 50, most), (most - 5, most - 5)):
        goal = replace(a_goal(), asked_bytes=asked)
        assert curve_of(problem, kept, goal, correction, OTHER, 2).present.goal_bytes == shown


@pytest.mark.parametrize("goals", [1, 101, 2.0, True])
def test_a_number_of_goals_that_is_none_is_refused(goals):
    problem = random_problem(3)
    with pytest.raises(ConfigError, match="goals="):
        curve_of(problem, smallest(problem)[0], a_goal(), Correction(0.0), OTHER, goals)


def net(width=64):
    """Saves nothing that a codec takes a byte off: its plans depend on no clock."""
    torch.manual_seed(0)
    block = (torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width))
    return torch.nn.Sequential(*(copy.deepcopy(m) for _ in range(3) for m in block))


def step(model):
    torch.manual_seed(1)
    model.zero_grad()
    model(torch.randn(128, 64)).square().mean().backward()
    return [p.grad.clone() for p in model.parameters()]


def steps(model, n):
    for _ in range(n):
        step(model)


@pytest.fixture
def curve_at_first(install):
    """The handle of a model under a goal, and the curve of its first plan."""

    def of(model, fit):
        handle = install(model, fit=fit)
        while handle.goal.phase != "obeying":
            step(model)
        return handle, handle.curve(7)

    return of


def test_a_goal_in_the_middle_of_the_curve_is_held_by_the_plan_of_the_curve(curve_at_first):
    _, found = curve_at_first(net(), "1TiB")
    assert_is_a_curve(found)
    middle = found.points[len(found.points) // 2]
    model = net()
    handle, again = curve_at_first(model, middle.goal_bytes)
    assert_agrees(again, handle.goal)
    assert again.present in again.points[1:]
    assert (
        replace(again.present, slowdown=middle.slowdown, measured_bytes=None, measured_s=None)
        == middle
    )
    steps(model, 4)
    assert handle.goal.held


def test_the_curve_of_a_goal_out_of_reach_ends_at_the_goal_that_its_error_names(install):
    model = net()
    handle = install(model, fit=sum(2 * p.nbytes for p in model.parameters()) + 200_000)
    with pytest.raises(GoalError) as error:
        steps(model, STEPS)
    steps(model, 4)
    found, goal = handle.curve(6), handle.goal
    assert_agrees(found, goal)
    last = found.points[-1]
    assert last is found.present
    assert last.goal_bytes == error.value.smallest_bytes == found.smallest_bytes
    assert min(point.goal_bytes for point in found.points) == last.goal_bytes
    assert show_bytes(error.value.smallest_bytes, up=True) in str(found).splitlines()[-1]


@pytest.mark.parametrize("fit", ["min", "half"])
def test_the_curve_agrees_with_the_goal_in_every_step_and_changes_nothing(
    make_training, sizes, install, monkeypatch, fit
):
    monkeypatch.setattr("cswap.fit.controller.MOST_REPRICED", 3)
    monkeypatch.setattr("cswap.fit.pace.Pace.changes", lambda *_: False)  # by the machine's load
    mine, plain = (make_training("blocks") for _ in range(2))
    resident, saved = sizes(mine)
    goal = {"fit": int(resident + 0.5 * saved)}
    handle = install(mine.model, **({"fit": fit, "slowdown": 3.0} if fit == "min" else goal))
    measured = 0
    for n in range(3 * STEPS):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
        if handle.goal.phase == "obeying" and n % 3 == 0:
            if n == 2 * STEPS:
                handle._fit._correction.bias += 4096
                handle._fit._begin_planning()  # with the measured times, if there is a limit
            before, stats = handle.goal, handle.stats.to_dict()
            found, fit_ = handle.curve(2), handle._fit
            assert_agrees(found, before)
            priced_s = fit_._costs.priced.added_s(fit_._plan)  # of the other points, too
            assert found.present.added_s == pytest.approx(priced_s)
            assert (handle.goal, handle.stats.to_dict()) == (before, stats)
            measured += fit_._costs.obeyed_s is not None
    assert measured


def test_over_a_link(machine, install):
    torch.manual_seed(0)
    model = torch.nn.Sequential(over_a_link.Block(), over_a_link.Block())
    x = torch.randn(over_a_link.ROWS, over_a_link.WIDTH)
    weights = 2 * sum(p.nbytes for p in model.parameters())
    handle = install(model, fit=int(weights + 0.9 * over_a_link.saved_bytes(model, x)))
    while handle.goal.phase != "obeying":
        over_a_link.step(model, x)
        machine.cuda.synchronize()
    found = handle.curve(4)
    assert_agrees(found, handle.goal)
    assert found.points[-1].peak_bytes < found.points[0].peak_bytes
    # Time beside the computation, and not as if nothing hid the copies.
    assert found.points[-1].added_s < sum(
        way.alone_s(handle._fit._costs.priced.over_link.link)
        for one in handle._fit._costs.priced.saved
        for way in one.ways
        if way.action == "raw"
    )


def test_without_a_plan_of_explored_steps_an_error_says_what_to_do(install, tmp_path):
    model = net()
    with pytest.raises(ConfigError, match=r"no goal.*fit=\.\.\."):
        install(model).curve()
    handle = install(model, fit="1GiB")
    step(model)
    with pytest.raises(ConfigError, match=r"phase 'exploring'.*train 6 steps"):
        handle.curve()
    while handle.goal.phase != "obeying":
        step(model)
    path = tmp_path / "schedule.json"
    handle.schedule.save(path)
    handle.curve(2)
    handle._fit._explore()
    with pytest.raises(ConfigError, match=r"phase 'exploring'"):
        handle.curve()
    while handle.goal.phase != "obeying":
        step(model)
    handle._fit._give_up("it is a test")
    with pytest.raises(ConfigError, match=r"phase 'given up'.*the log says why"):
        handle.curve()
    with pytest.raises(ConfigError, match=r"phase 'obeying'.*without schedule="):
        install(net(), fit="1GiB", schedule=path).curve()


@pytest.fixture
def a_curve():
    problem, correction = random_problem(3, 8), Correction(0.02)
    plan = within_bytes(problem, 0.6 * problem.raw_peak_bytes)
    assert plan is not None
    goal = a_goal(measured_bytes=30 << 20, step_s=1.25, smallest_bytes=1 << 20)
    return curve_of(problem, plan, goal, correction, OTHER, 5)


def test_figures_in_files(a_curve, tmp_path):
    a_curve.save(tmp_path / "a.json")
    a_curve.save(str(tmp_path / "a.CSV"))
    found = json.loads((tmp_path / "a.json").read_text())
    assert (found["kind"], found["version"], found["plain_s"]) == ("cswap curve", 1, 0.5)
    assert found["smallest_bytes"] == 1 << 20
    for one, point in zip(found["points"], a_curve.rows, strict=True):
        assert one.pop("present") is (point is a_curve.present)
        assert Point(**{**one, "actions": Counter(one["actions"])}) == point
    lines = csv.DictReader((tmp_path / "a.CSV").read_text().splitlines())
    for line, point in zip(lines, a_curve.rows, strict=True):
        assert float(line["slowdown"]) == point.slowdown
        assert line["measured_bytes"] == ("" if point is not a_curve.present else str(30 << 20))
        assert f"{point.actions['zvc']} zvc" in line["actions"] or not point.actions["zvc"]


def test_pictures(a_curve, tmp_path, monkeypatch):
    pytest.importorskip("matplotlib")
    figures: list[Any] = []

    def noted(*size):
        figures.append(new_figure(*size))
        return figures[-1]

    monkeypatch.setattr("cswap.report.curve.new_figure", noted)
    for name, begin in (("a.png", b"\x89PNG"), ("a.svg", b"<?xml")):
        a_curve.save(tmp_path / name)
        assert (tmp_path / name).read_bytes().startswith(begin)
    (axes,) = figures[0].axes
    lines = {line.get_label(): line.get_xydata().tolist() for line in axes.lines}
    expected = [[p.peak_bytes / (1 << 20), p.slowdown] for p in a_curve.points]
    assert lines["goals, predicted"] == expected
    assert lines["everything stays"] == expected[:1]
    assert lines["the present plan, predicted"][0] in expected
    assert lines["the present plan, measured"] == [[30.0, 2.5]]


@pytest.mark.parametrize(
    ("name", "text"), [("a.pdf", r"\.png, \.svg, \.json, \.csv"), ("no/a.csv", "cannot be written")]
)
def test_a_file_that_cannot_be_written_is_named(a_curve, tmp_path, name, text):
    with pytest.raises(ConfigError, match=text) as error:
        a_curve.save(tmp_path / name)
    assert name in str(error.value)


def test_without_matplotlib_the_error_has_the_command_and_nothing_is_written(
    a_curve, tmp_path, monkeypatch
):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ConfigError, match=r'pip install "\.\[bench\]"'):
        a_curve.save(tmp_path / "a.png")
    assert not list(tmp_path.iterdir())
