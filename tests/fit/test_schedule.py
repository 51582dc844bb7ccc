"""A goal's plan in a file, that the next run begins with."""

from __future__ import annotations

import json
import logging
import random
from collections import Counter

import pytest
import torch

import cswap
import cswap.api
from cswap.config import SwapConfig
from cswap.errors import ConfigError
from cswap.fit.schedule import Schedule, made_for
from cswap.units import show_bytes
from tests.fit import test_changing_steps as changing
from tests.fit.test_goal import STEPS, train
from tests.fit.test_goal_over_a_link import machine
from tests.fit.test_smallest_goal import NETS, Run

__all__ = ["machine"]

HALF = 0.5


@pytest.fixture
def goal(training, sizes):
    """Options of a goal at half of the saved bytes."""
    resident, saved = sizes(training)
    return {"fit": int(resident + HALF * saved), "min_bytes": 0}


@pytest.fixture
def saved(training, goal, install, tmp_path):
    """The path of a schedule, and the handle's goal when it was saved."""
    handle = install(training.model, **goal)
    train(training, 3 * STEPS)
    assert handle.goal.held
    path = tmp_path / "schedule.json"
    handle.schedule.save(path)
    found = handle.goal
    handle.remove()
    return path, found


def test_the_next_run_begins_as_the_last_one_ended(training, goal, saved, make_training, install):
    path, before = saved
    mine, plain = (make_training(training.kind) for _ in range(2))
    handle = install(mine.model, schedule=path, **goal)
    for n in range(STEPS):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
        assert handle.goal.phase == "obeying"
        assert handle.goal.actions == before.actions
        assert handle.goal.held in (None, True)
    assert handle.goal.held
    assert handle.goal.plans == 0
    assert handle.goal.plain_s is not None
    assert handle.stats.fallbacks == 0


@pytest.mark.parametrize(
    "kind",
    [pytest.param(kind, marks=() if kind == "unet" else pytest.mark.slow) for kind in NETS],
)
def test_no_step_under_a_schedule_is_above_the_goal(kind, install, tmp_path):
    resident, saved = sizes_of(kind)
    fit, path = int(resident + 0.8 * saved), tmp_path / "schedule.json"
    before = Run(kind, 0)
    handle = install(before, fit=fit)
    before.train_steps(2 * STEPS)
    assert handle.goal.held
    handle.schedule.save(path)
    handle.remove()
    mine = Run(kind, 0)
    handle = install(mine, fit=fit, schedule=path)
    peaks = [mine.saved_peak(handle) for _ in range(STEPS)]
    assert max(peaks) <= fit - resident
    assert handle.goal.plans == 0


def sizes_of(kind):
    """Resident bytes of a run, and bytes of all tensors that a step saves."""
    plain = Run(kind, 0)
    plain.train_steps(1)
    tensors = [*plain.parameters(), *plain.parameters(), *plain.buffers()]
    tensors += [x for one in plain.optimizer.state.values() for x in one.values()]
    return sum(x.nbytes for x in tensors), plain.saved_peak(None)


def test_a_schedule_is_what_was_saved(goal, saved):
    path, before = saved
    config = SwapConfig(**goal)
    found = Schedule.read(path, config)
    assert found.plan.counts == before.actions
    assert Schedule.read(found, config) is found
    again = path.with_name("again.json")
    found.save(again)
    assert json.loads(again.read_text()) == json.loads(path.read_text())
    assert Schedule.read(again, config) == found
    assert Schedule.read(path.read_text(), config) == found


def test_it_prints_what_both_searches_have_found(training, goal, saved, make_training, install):
    path, _ = saved
    mine = make_training(training.kind)
    handle = install(mine.model, **goal)
    train(mine)
    plan = handle.schedule.plan
    assert set(plan.searches) == {"solver", "greedy"}
    text = str(handle.schedule)
    assert text.startswith(f"schedule for fit={goal['fit']}: ")
    assert f"{plan.counts['keep']} keep" in text
    for name, (peak_bytes, added_s) in plan.searches.items():
        assert f"; {name} {show_bytes(peak_bytes)}, {1e3 * added_s:.2f} ms" in text
    from_file = Schedule.read(path, SwapConfig(**goal))  # which has the plan alone
    assert "; predicted " in str(from_file)


def test_there_is_none_before_there_is_a_plan(training, goal, install):
    handle = install(training.model, **goal)
    assert handle.schedule is None
    handle.remove()
    assert install(training.model).schedule is None


@pytest.mark.parametrize(
    ("option", "value", "text"),
    [("fit", "2GiB", "fit="), ("remat", False, "remat=True"), ("lossy", "int8", "lossy=off")],
)
def test_a_schedule_for_something_else_is_said_and_not_obeyed(
    training, goal, saved, install, caplog, option, value, text
):
    path, _ = saved
    with caplog.at_level(logging.WARNING):
        handle = install(training.model, schedule=path, **{**goal, option: value})
    (record,) = (r for r in caplog.records if "schedule" in r.message)
    assert f"made for {text}" in record.message
    training.step()
    assert handle.goal.phase == "exploring"


@pytest.mark.parametrize("how", ["another model", "larger"])
def test_steps_that_save_other_tensors_are_explored(how, make_training, install, tmp_path):
    goal, path = {"fit": "min", "slowdown": 50.0}, tmp_path / "schedule.json"
    before = make_training("blocks")
    handle = install(before.model, **goal)
    train(before)
    handle.schedule.save(path)
    handle.remove()
    mine, plain = (make_training("convolutions" if how != "larger" else "blocks") for _ in "ab")
    if how == "larger":
        mine.x = plain.x = torch.cat([mine.x, mine.x])
    handle = install(mine.model, schedule=path, **goal)
    phases = []
    for n in range(3 * STEPS):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
        phases.append(handle.goal.phase)
    assert phases[0] == phases[-1] == "obeying"
    assert "exploring" in phases
    assert handle.goal.plans > 0


def test_a_plan_above_the_limit_is_made_anew(training, goal, saved, make_training, install):
    path, _ = saved
    found = json.loads(path.read_text())
    for one in found["tensors"].values():
        one["action"] = "keep"
    path.write_text(json.dumps(found))
    mine = make_training(training.kind)
    handle = install(mine.model, schedule=path, **goal)
    mine.step()
    assert set(handle.goal.actions) == {"keep"}
    train(mine, 2 * STEPS)
    assert handle.goal.plans > 0
    assert handle.goal.held


def _without(name):
    return lambda found: {k: v for k, v in found.items() if k != name}


def _tensor(**changes):
    def change(found):
        number, one = next(iter(found["tensors"].items()))
        return {**found, "tensors": {**found["tensors"], number: {**one, **changes}}}

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (lambda _: [], "must be a JSON object"),
        (lambda found: {**found, "version": 9}, "is no schedule of version 1"),
        (lambda found: {**found, "kind": "plan"}, "handle.schedule.save"),
        (_without("tensors"), "schedule.tensors=None"),
        (_without("peak_bytes"), "schedule.peak_bytes=None"),
        (lambda found: {**found, "added_s": -1.0}, "schedule.added_s=-1.0"),
        (lambda found: {**found, "plain_s": "1"}, "schedule.plain_s='1'"),
        (lambda found: {**found, "made_for": {"fit": 3}}, "schedule.made_for['fit']=3"),
        (_tensor(action="nothing"), "'nothing'"),
        (_tensor(action="int8"), "has the lossy codec 'int8', which lossy='off'"),
        (_tensor(nbytes=-1), ".nbytes=-1"),
        (_tensor(saves=[["a", "float32"]]), "must be a module's path, a dtype and a number"),
        (_tensor(saves=[["a", "nn", 0]]), "'nn': is no dtype of torch"),
        (_tensor(saves=[["a", "float32", 0], ["a", "float32", 0]]), "is saved twice"),
    ],
)
def test_a_wrong_entry_is_named_and_nothing_is_installed(training, goal, saved, change, text):
    path, _ = saved
    path.write_text(json.dumps(change(json.loads(path.read_text()))))
    with pytest.raises(ConfigError) as error:
        cswap.install(training.model, schedule=path, **goal)
    assert text in str(error.value)
    assert "schedule" in str(error.value) or "codec" in str(error.value)
    assert "forward" not in vars(training.model)


@pytest.mark.parametrize("options", [{}, {"fit": "1GiB"}, {"codec": "zvc"}])
def test_without_a_goal_there_is_nothing_to_obey(options, tmp_path):
    with pytest.raises(ConfigError, match="needs a model and a goal"):
        cswap.swapping(schedule=str(tmp_path / "a.json"), **options)
    if "codec" in options:
        with pytest.raises(ConfigError, match="needs a model and a goal"):
            cswap.install(torch.nn.Linear(2, 2), schedule="{}", **options)


def dealt_anew(handle, path, seed):
    """Save the plan of a program with its decisions dealt out anew; whether there was one."""
    fit = handle._fit
    if fit is None or fit._plan is None:
        return False
    made = made_for(fit._asked, fit._device.type, fit._engine.config)
    Schedule(made, fit._plan, 0, None).save(path)
    found, deal = json.loads(path.read_text()), random.Random(seed)
    actions = [one["action"] for one in found["tensors"].values()]
    for one in found["tensors"].values():
        one["action"] = deal.choice([*actions, "raw", "zvc", "keep", "remat"])
    path.write_text(json.dumps(found))
    return True


@pytest.mark.parametrize("over_link", [False, True])
@pytest.mark.parametrize("seeds", [range(3), pytest.param(range(3, 60), marks=pytest.mark.slow)])
def test_changing_steps_under_other_decisions(seeds, over_link, request, tmp_path, monkeypatch):
    """The plan of the same program, with its decisions dealt out anew: every bit is right."""
    cuda = request.getfixturevalue("machine").cuda if over_link else None
    after_step = (lambda: None) if cuda is None else cuda.synchronize
    phases: Counter[str] = Counter()
    install, path = cswap.install, tmp_path / "schedule.json"
    for seed in seeds:
        handles: list[cswap.api.InstallHandle] = []

        def installed(model, handles=handles, **options):
            more = {"schedule": path} if handles and "fit" in options else {}
            handles.append(install(model, **options, **more))
            if more and handles[-1].goal is not None:
                phases[handles[-1].goal.phase] += 1
            return handles[-1]

        monkeypatch.setattr(cswap, "install", installed)
        changing.run_program(seed, after_step)
        if dealt_anew(handles[0], path, seed):
            changing.run_program(seed, after_step)
        assert cuda is None or not cuda.faults, (seed, cuda.faults[:5])
    assert set(phases) == {"obeying"}
    assert phases["obeying"] >= len(seeds) // 2
