"""Without options, a model on a GPU has the goal of the least memory at a tenth more time."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap import SwapConfig, api
from cswap.fit import controller, plain_steps
from cswap.fit.goal import Asked
from cswap.fit.pace import Pace
from tests.fit.test_goal_over_a_link import N_BLOCKS, ROWS, WIDTH, Block, machine, saved_bytes, step

__all__ = ["machine"]

USABLE = 1 << 30


@pytest.fixture
def gpu(machine, monkeypatch):
    """A stand-in for a GPU with memory for a plain step; a model is on it once it says so."""
    gpu = torch.device("cuda")
    monkeypatch.setattr(api, "one_device", lambda model: gpu if model.is_there else None)
    monkeypatch.setattr(controller, "usable_bytes", lambda _device: USABLE)
    # Between two events of the stand-in are always 2 ms.
    monkeypatch.setattr("cswap.fit.pace.NOT_PLAIN", 0.0)
    monkeypatch.setattr("cswap.fit.pace.LONGEST_PLAIN", 1e12)
    return machine


def made():
    torch.manual_seed(0)
    net: Any = nn.Sequential(*(Block() for _ in range(N_BLOCKS)))
    x = torch.randn(ROWS, WIDTH)
    net.is_there = True
    return net, x, step(net, x)


def train(gpu, handle, net, x, expected, n):
    """Steps, with the phase and the number of packed tensors after each."""
    seen = []
    for _ in range(n):
        assert all(map(torch.equal, step(net, x), expected))
        gpu.cuda.synchronize()
        seen.append((handle.goal.phase, handle.stats.packed))
    return seen


def test_a_goal_is_planned_after_steps_without_cswap(gpu):
    net, x, expected = made()
    with cswap.install(net, min_bytes=0) as handle:
        assert handle.goal is None  # nobody knows yet where the model is
        seen = train(gpu, handle, net, x, expected, 24)
        goal: Any = handle.goal
        assert (goal.asked_bytes, goal.asked_slowdown, goal.phase) == (None, 1.1, "obeying")
        assert handle.stats.fallbacks == 0, handle.stats.fallbacks_by_reason
        timed = [i for i, (phase, _) in enumerate(seen) if phase == "timing"]
        assert len(timed) == plain_steps.PLAIN_STEPS + 1
        assert seen[timed[0] - 1][1] == seen[timed[-1]][1]  # the engine's hooks were off
        assert seen[timed[-1] + 1][1] > seen[timed[-1]][1]
        fit: Any = handle._fit
        assert fit._pace.was_plain
        assert fit._chooser.times.repriced(fit._problem) is not None  # the hooks' times came to it
        assert fit._plain.times is not None  # the marked step was like the explored ones
        assert handle.engine.stand_in is None
        assert goal.predicted_slowdown <= 1.1
        assert goal.measured_bytes is None  # the meter is the user's


@pytest.mark.parametrize(
    ("busy", "adds", "plans"), [(1.3, 0.1, 1), (0.7, 0.1, 1), (1.0, 0.3, 2), (1.3, 0.3, 2)]
)
def test_plain_steps_run_again_before_a_plan_gets_less_time(gpu, monkeypatch, busy, adds, plans):
    """All steps take ``busy`` times as long, later; one with a plan adds so much of a plain one."""
    speed, added = [1.0], [0.1]

    def plain_s(step):
        return speed[0]

    def step_s(step):
        return speed[0] * (1 + added[0] * (step.n_uses > 0))

    monkeypatch.setattr("cswap.fit.seen.Step.plain_s", property(plain_s))
    monkeypatch.setattr("cswap.fit.seen.Step.step_s", property(step_s))
    net, x, expected = made()
    with cswap.install(net, min_bytes=0) as handle:
        train(gpu, handle, net, x, expected, 30)
        fit: Any = handle._fit
        goal: Any = handle.goal
        assert (goal.phase, goal.plans, goal.plain_s) == ("obeying", 1, 1.0)
        decided = fit._plan.decided
        speed[0], added[0] = busy, adds
        seen = train(gpu, handle, net, x, expected, 70)
        assert {phase for phase, _ in seen} == {"obeying"}
        n_off = sum(a == b for (_, a), (_, b) in itertools.pairwise(seen))
        goal = handle.goal
        assert min(goal.plans, 2) == plans
        assert (fit._pace.share < 1) is (plans > 1)
        if plans == 1:
            assert fit._plan.decided is decided
        if busy < 1:  # nothing is too slow
            assert (n_off, goal.plain_s) == (0, 1.0)
        else:
            assert n_off >= plain_steps.PLAIN_STEPS
            assert goal.plain_s == busy
        assert handle.stats.fallbacks == 0, handle.stats.fallbacks_by_reason


def test_bytes_that_are_not_the_engines_are_seen_in_explored_steps(gpu, monkeypatch):
    net, x, expected = made()
    with cswap.install(net, min_bytes=0) as handle:
        counters = handle.engine.counters
        monkeypatch.setattr(
            "cswap.fit.resident.CountedMeter.lap", lambda _meter: (1 << 40) + counters.device_bytes
        )
        train(gpu, handle, net, x, expected, 24)
        fit: Any = handle._fit
        assert fit._other == 1 << 40
        assert not fit._problem.over_link.other_bytes.any()


@pytest.mark.parametrize("share", [0.0, pytest.param(0.5, marks=pytest.mark.slow)])
def test_no_step_is_plain_where_there_may_be_no_room(gpu, monkeypatch, share):
    net, x, expected = made()
    usable = [0]
    monkeypatch.setattr(controller, "usable_bytes", lambda _device: usable[0])
    with cswap.install(net, min_bytes=0, slowdown=1.5) as handle:
        train(gpu, handle, net, x, expected, 2)
        usable[0] = int(share * sum(p.nbytes for p in net.parameters()))
        seen = train(gpu, handle, net, x, expected, 22)
        packed = [n for _, n in seen]
        assert "timing" not in {phase for phase, _ in seen}
        assert all(a < b for a, b in itertools.pairwise(packed))
        goal: Any = handle.goal
        assert goal.phase in ("obeying", "unreachable")  # no step holds nothing
        assert goal.plain_s > 0


def test_where_no_plain_step_fits_the_devices_memory_is_the_goal(gpu, monkeypatch, tmp_path):
    net, x, expected = made()
    saved = saved_bytes(net, x)
    usable = [int(2 * sum(p.nbytes for p in net.parameters()) + 0.6 * saved)]
    monkeypatch.setattr(controller, "usable_bytes", lambda _device: usable[0])
    with cswap.install(net, min_bytes=0) as handle:
        seen = train(gpu, handle, net, x, expected, 40)
        goal: Any = handle.goal
        assert (goal.asked_bytes, goal.asked_slowdown, goal.phase) == (usable[0], None, "obeying")
        # Not the prediction: it is corrected by a meter that counts the host's bytes, too.
        assert goal.measured_bytes <= usable[0]
        assert goal.held
        assert "timing" not in {phase for phase, _ in seen}
        schedule: Any = handle.schedule
        schedule.save(tmp_path / "schedule.json")
        # Once it would fit, the next exploration asks for the least memory again.
        usable[0] = USABLE
        fit: Any = handle._fit
        fit._explore()
        train(gpu, handle, net, x, expected, 24)
        goal = handle.goal
        assert (goal.asked_bytes, goal.asked_slowdown) == (None, 1.1)
    usable[0] //= 1000
    with cswap.install(net, min_bytes=0, schedule=tmp_path / "schedule.json") as handle:
        train(gpu, handle, net, x, expected, 4)
        goal = handle.goal
        assert (goal.asked_bytes, goal.phase, goal.plans) == (usable[0], "obeying", 0)


def test_a_model_that_comes_to_the_gpu_later_has_it_then(gpu):
    net, x, expected = made()
    net.is_there = False
    handle = cswap.install(net, min_bytes=0)
    net.is_there = True
    step(net, x)
    gpu.cuda.synchronize()
    assert handle.goal is not None
    handle.remove()
    assert all(map(torch.equal, step(net, x), expected))


def test_a_model_elsewhere_has_none(gpu):
    net, x, expected = made()
    net.is_there = False
    with cswap.install(net, min_bytes=0) as handle:
        for _ in range(3):
            assert all(map(torch.equal, step(net, x), expected))
        assert handle.goal is None


def test_a_model_that_saves_nothing_large_has_none(gpu):
    torch.manual_seed(0)
    net: Any = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    net.is_there, x = True, torch.randn(3, 4)
    expected = step(net, x)
    with cswap.install(net, min_bytes=1 << 20) as handle:
        seen = train(gpu, handle, net, x, expected, 8)
        assert seen[-1][0] == "given up"
        fit: Any = handle._fit
        assert not fit._exploration._steps


def test_a_forward_without_gradients_decides_nothing(gpu):
    net, x, _ = made()
    with cswap.install(net, min_bytes=0) as handle:
        with torch.no_grad():
            net(x)
        assert handle.goal is None
        step(net, x)
        gpu.cuda.synchronize()
        goal: Any = handle.goal
        assert goal.phase == "exploring"


def test_steps_that_are_captured_are_not_seen(gpu, monkeypatch):
    from cswap.devices.stopwatch import CudaStopwatch

    net, x, expected = made()
    captured = [True]
    monkeypatch.setattr(CudaStopwatch, "is_on", staticmethod(lambda: not captured[0]))
    with cswap.install(net, min_bytes=0) as handle:
        step(net, x)
        gpu.cuda.synchronize()
        assert handle.goal is None
        captured[0] = False
        train(gpu, handle, net, x, expected, 2)
        captured[0] = True
        packed = handle.stats.packed
        train(gpu, handle, net, x, expected, 2)
        assert handle.stats.packed > packed
        captured[0] = False
        assert train(gpu, handle, net, x, expected, 24)[-1][0] == "obeying"


def assert_all_leave(gpu, caplog, message):
    """Without a goal, which a warning says once."""
    net, x, expected = made()
    with cswap.install(net, min_bytes=0) as handle:
        for _ in range(3):
            assert all(map(torch.equal, step(net, x), expected))
            gpu.cuda.synchronize()
        assert handle.goal is None
        assert handle.stats.swapped > 0
    assert sum(message in record.message for record in caplog.records) == 1


def test_a_goal_that_cannot_begin_is_no_error(gpu, monkeypatch, caplog):
    def broken(_index):
        raise ValueError("no link")

    monkeypatch.setattr(controller, "link_rates", broken)
    assert_all_leave(gpu, caplog, "no link")


class Later:
    """In place of `Background`: done when the test says so."""

    done = False

    def __init__(self, work):
        self.result = work


def test_a_plan_that_comes_after_the_goal_was_given_up_is_not_obeyed(gpu, monkeypatch):
    monkeypatch.setattr("cswap.fit.controller.Background", Later)
    monkeypatch.setattr(Later, "done", False)
    net, x, expected = made()
    with cswap.install(net, min_bytes=0) as handle:
        seen = train(gpu, handle, net, x, expected, 8)
        assert seen[-1][0] == "planning"
        fit: Any = handle._fit
        fit._chooser.step.stranger = Later.done = True
        assert train(gpu, handle, net, x, expected, 3)[-1][0] == "given up"


def test_an_evaluation_after_a_plain_step_does_not_count(gpu, monkeypatch):
    net, x, expected = made()
    seconds = iter([9.0, 0.001, 0.5])
    noted = []
    note = Pace.note_plain

    def said(pace, _seconds):
        pace.plain_s = 1.0
        noted.append(note(pace, next(seconds)))
        return noted[-1]

    monkeypatch.setattr(Pace, "note_plain", said)
    monkeypatch.setattr("cswap.fit.pace.NOT_PLAIN", 0.3)
    monkeypatch.setattr("cswap.fit.pace.LONGEST_PLAIN", 1.1)
    with cswap.install(net, min_bytes=0) as handle:
        train(gpu, handle, net, x, expected, 24)
        goal: Any = handle.goal
        assert (noted, goal.plain_s) == ([False, False, True], 0.5)


def test_several_forwards_before_a_backward_end_it_quietly(gpu, caplog):
    net, x, _ = made()
    net.zero_grad(set_to_none=True)
    (net(x).square().mean() + net(2 * x).square().mean()).backward()
    expected = [p.grad.clone() for p in net.parameters()]
    with cswap.install(net, min_bytes=0) as handle:
        for _ in range(4):
            net.zero_grad(set_to_none=True)
            (net(x).square().mean() + net(2 * x).square().mean()).backward()
            gpu.cuda.synchronize()
            assert all(map(torch.equal, [p.grad for p in net.parameters()], expected))
        goal: Any = handle.goal
        assert goal.phase == "given up"
        assert handle.stats.swapped > 0
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_removing_it_while_the_hooks_are_off_leaves_nothing(gpu):
    net, x, expected = made()
    handle = cswap.install(net, min_bytes=0)
    while handle.goal is None or handle.goal.phase != "timing":
        step(net, x)
        gpu.cuda.synchronize()
    handle.remove()
    with cswap.install(net, min_bytes=0, codec="raw") as other:
        assert all(map(torch.equal, step(net, x), expected))
        assert other.goal is None
        assert other.stats.packed > 0


@pytest.mark.parametrize(
    ("options", "slowdown"),
    [
        ({}, 1.1),
        ({"slowdown": 1.3}, 1.3),
        ({"lossy": "int8", "slowdown": 1.3}, 1.3),
        ({"lossy": "int8"}, None),  # bytes matter more than time
        ({"codec": "raw"}, None),
        ({"policy": "raw"}, None),
        ({"budget": 1 << 20}, None),
        ({"host_limit": 1 << 20}, None),
        ({"keep_last": 1}, None),
        ({"verify": True}, None),
        ({"fit": "min"}, None),  # which is a goal of its own
    ],
)
def test_options_that_say_what_has_to_leave_come_first(options, slowdown):
    found = Asked.without_fit(SwapConfig(**options))
    assert (found and found.slowdown) == slowdown
