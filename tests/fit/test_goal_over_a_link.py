"""A goal on a device with a link, where autograd has a thread of its own for backward."""

from __future__ import annotations

import threading
import types
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.advisor import advisor
from cswap.engine.order.step_order import NO_BACKWARD
from cswap.engine.saved.packed import PackedView
from cswap.engine.transfer import device_lanes
from cswap.engine.trials import Trials
from cswap.fit import controller, goal, goal_chooser, resident, solve, whole_device
from cswap.fit.correction import Correction
from cswap.fit.link_rates import LinkRates
from cswap.fit.plan_costs import PlanCosts
from cswap.fit.saved import Decided, Key
from cswap.fit.solve import Found
from cswap.profiler import LateProfile
from tests.devices.lagging_machine import LaggingMachine

WIDTH, ROWS, N_BLOCKS = 64, 1024, 4
MIB = 1 << 20


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 4 * WIDTH)
        self.gelu, self.down = nn.GELU(), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x):
        return x + self.down(self.gelu(self.up(self.norm(x))))


@pytest.fixture
def machine(monkeypatch):
    """A stand-in for a GPU that the goal takes for one; backward seems to run in another thread."""
    made = LaggingMachine(monkeypatch)

    def ident():
        in_backward = torch._C._current_graph_task_id() != NO_BACKWARD
        return -1 if in_backward else threading.get_ident()

    device: Any = types.SimpleNamespace(type="cuda", index=0)
    monkeypatch.setattr(device_lanes, "cpu_device", lambda: made.device)
    monkeypatch.setattr(controller, "device_of", lambda _model: device)
    monkeypatch.setattr(controller, "usable_bytes", lambda _device: 0)  # for no plain step
    monkeypatch.setattr(controller, "link_rates", lambda _: LinkRates(1e9, 1e9, 0.8e9))
    monkeypatch.setattr(controller, "meter_for", lambda _, found: resident.CountedMeter(found))
    monkeypatch.setattr(goal_chooser, "threading", types.SimpleNamespace(get_ident=ident))
    yield made
    assert not made.cuda.faults, made.cuda.faults[:5]


def step(net, x):
    net.zero_grad(set_to_none=True)
    net(x).square().mean().backward()
    return [p.grad.clone() for p in net.parameters()]


def blocks_and_half_of_their_bytes():
    """A net, its input, and a limit in bytes that leaves room for half of its saved tensors."""
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(N_BLOCKS))), torch.randn(ROWS, WIDTH)
    weights = sum(p.nbytes for p in net.parameters())
    return net, x, int(2 * weights + 0.5 * saved_bytes(net, x))


def saved_bytes(net, x):
    found = {}

    def note(tensor):
        found[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        net(x)
    return sum(found.values())


@pytest.mark.parametrize("share", [0.9, pytest.param(0.7, marks=pytest.mark.slow)])
def test_a_goal_is_planned_and_obeyed(machine, share):
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(N_BLOCKS))), torch.randn(ROWS, WIDTH)
    expected = step(net, x)
    weights = sum(p.nbytes for p in net.parameters())
    limit = int(2 * weights + share * saved_bytes(net, x))
    with cswap.install(net, fit=limit, min_bytes=0) as handle:
        for _ in range(40):
            assert all(map(torch.equal, step(net, x), expected))
            machine.cuda.synchronize()
        found = handle.goal
        assert found is not None
        assert found.phase == "obeying", str(found)
        assert found.actions.total() > 0
        assert handle.stats.fallbacks == 0, handle.stats.fallbacks_by_reason


def is_leaving(passage):
    return passage is not None and passage.region.source is not None


def test_chains_are_tried_in_explored_steps_alone_and_let_their_inputs_leave(machine, monkeypatch):
    tried, inputs_stay, phases, try_chain = [], [], [], Trials._try

    def noted(self, token, remat):
        others = [packed for packed in remat.inputs if isinstance(packed, PackedView)]
        left = [is_leaving(one.token.stored) for one in others]
        found = try_chain(self, token, remat)
        after = [is_leaving(one.token.stored) for one in others]
        tried.append(sum(left))
        inputs_stay.append(left != after)
        return found

    monkeypatch.setattr(Trials, "_try", noted)
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(N_BLOCKS))), torch.randn(ROWS, WIDTH)
    limit = int(2 * sum(p.nbytes for p in net.parameters()) + 0.7 * saved_bytes(net, x))
    with cswap.install(net, fit=limit, min_bytes=0) as handle:
        for _ in range(16):
            step(net, x)
            machine.cuda.synchronize()
            found = handle.goal
            assert found is not None
            phases.append((found.phase, found.plans, len(tried)))
    assert sum(tried) > 0  # inputs that were on their way out
    assert not any(inputs_stay)
    explored = [n for phase, _, n in phases if phase != "obeying"]
    assert phases[-1] == ("obeying", phases[-1][1], explored[-1]), phases


@pytest.mark.parametrize("added_s", [-1e9, 1e9])
def test_a_looser_plan_is_obeyed_only_if_it_takes_less_time(machine, monkeypatch, added_s):
    made: list[Any] = []
    found_for = solve.found_for

    def noted(*arguments):
        plan: Any = found_for(*arguments).plan
        if made:  # another one, that says so of itself
            others = {key: d._replace(action="keep") for key, d in plan.decided.items()}
            plan = replace(plan, decided=others, added_s=added_s)
        made.append(plan)
        return Found(plan)

    monkeypatch.setattr(controller, "found_for", noted)
    monkeypatch.setattr(Correction, "may_loosen", lambda *_: len(made) == 1)
    net, x, limit = blocks_and_half_of_their_bytes()
    monkeypatch.setattr(resident.CountedMeter, "take", lambda *_: limit - 1)
    with cswap.install(net, fit=limit, min_bytes=0) as handle:
        for _ in range(40):
            step(net, x)
            machine.cuda.synchronize()
        fit: Any = handle._fit
        assert len(made) > 1
        assert fit._plan is made[1 if added_s < 0 else 0]


@pytest.mark.parametrize("third_is_too_much", [False, True])
def test_after_a_plan_that_was_too_loose_one_more_is_tried(machine, monkeypatch, third_is_too_much):
    made: list[Any] = []
    obeyed: list[int] = []
    found_for = solve.found_for

    def noted(problem, room, *arguments):
        plan: Any = found_for(problem, room, *arguments).plan
        # Each is another one, and faster than the one that is obeyed.
        decided = {**plan.decided, Key("", torch.float32, len(made)): Decided("keep", 0, 0)}
        made.append(replace(plan, decided=decided, added_s=1.0))
        rooms.append(room)
        return Found(made[-1], obeyed_s=1e9)

    def peak(*_):
        plan = None if not installed else installed[0]._fit._plan
        n = next((n for n, one in enumerate(made) if one is plan), 0)
        obeyed.append(n)
        return 1.05 * limit if n == 1 or (n == 2 and third_is_too_much) else 0.6 * limit

    monkeypatch.setattr(controller, "found_for", noted)
    net, x, limit = blocks_and_half_of_their_bytes()
    monkeypatch.setattr(resident.CountedMeter, "take", peak)
    installed: list[Any] = []
    rooms: list[float] = []
    with cswap.install(net, fit=limit, min_bytes=0) as handle:
        installed.append(handle)
        for _ in range(80):
            step(net, x)
            machine.cuda.synchronize()
        fit: Any = handle._fit
        assert len(made) == 3
        assert rooms[2] < rooms[1]
        assert fit._plan is made[0 if third_is_too_much else 2]
        assert set(obeyed) == {0, 1, 2}


def test_the_faster_plan_stays_however_late_the_second_one_is_made(machine, monkeypatch):
    # At first, planning finds nothing better.
    made: list[Any] = []
    nothing_better: list[bool] = []
    found_for = solve.found_for

    def noted(*arguments):
        plan: Any = found_for(*arguments).plan
        if made and not nothing_better:
            nothing_better.append(True)
        elif len(made) < 2:
            decided = {**plan.decided, Key("", torch.float32, len(made)): Decided("keep", 0, 0)}
            made.append(replace(plan, decided=decided, added_s=-5.0))
        return Found(made[-1], obeyed_s=1.0)

    monkeypatch.setattr(controller, "found_for", noted)
    fit_controller: Any = controller.FitController
    monkeypatch.setattr(PlanCosts, "note", lambda *_: True)
    monkeypatch.setattr(fit_controller, "_cost_s", lambda _, plan: 1 + 50 * (plan is not made[0]))
    may_loosen = Correction.may_loosen
    looked: list[bool] = []

    def only_notes(self, look):
        controlling: Any = handle._fit
        looked.append(controlling._chooser.step.looked)
        may_loosen(self, look)
        return False

    monkeypatch.setattr(Correction, "may_loosen", only_notes)
    monkeypatch.setattr(controller, "MOST_OVER_LINK", 2)
    net, x, limit = blocks_and_half_of_their_bytes()
    monkeypatch.setattr(resident.CountedMeter, "take", lambda *_: limit - 1)
    with cswap.install(net, fit=limit, min_bytes=0) as handle:
        for _ in range(120):
            step(net, x)
            machine.cuda.synchronize()
        fit: Any = handle._fit
        assert nothing_better
        assert fit._plan is made[0]
        assert looked
        assert all(looked)  # of the steps between, later ones may hold more


def test_tensors_whose_values_come_late_have_all_their_ways(machine, monkeypatch):
    # A GPU's sample arrives after the tensor was saved: in the first step nobody knows its values.
    late, get = set(), LateProfile.get

    def arrives_late(self):
        is_new = self not in late
        late.add(self)
        return None if is_new else get(self)

    monkeypatch.setattr(advisor, "_is_far", lambda _: True)
    monkeypatch.setattr(LateProfile, "get", arrives_late)
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(N_BLOCKS))), torch.randn(ROWS, WIDTH)
    with cswap.install(net, fit=saved_bytes(net, x), min_bytes=0) as handle:
        for n in range(20):
            step(net, x)
            machine.cuda.synchronize()
            if not n:  # without a sample, they leave raw: all might not fit
                assert "goal" not in handle.stats.kept_by_reason
                assert handle.stats.by_codec["raw"].count > 0
        fit: Any = handle._fit
        assert len(late) > N_BLOCKS
        assert all(len(one.ways) > 2 for one in fit._problem.saved if one.nbytes > MIB // 8)


def test_nothing_moves_while_all_fits_the_device(machine, monkeypatch):
    monkeypatch.setattr(goal, "usable_bytes", lambda _device: 1 << 30)
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(N_BLOCKS))), torch.randn(ROWS, WIDTH)
    expected, swapped = step(net, x), []
    with cswap.install(net, fit="device", min_bytes=0) as handle:
        for _ in range(30):
            assert all(map(torch.equal, step(net, x), expected))
            machine.cuda.synchronize()
            swapped.append(handle.stats.swapped)
        found = handle.goal
        assert found is not None
        assert (found.phase, found.asked_bytes) == ("obeying", 1 << 30)
        assert set(found.actions) == {"keep"}
        assert swapped[0] > 0  # a step in which all leave comes first
        assert swapped[-1] == swapped[20]


def test_a_device_that_is_too_small_is_no_error(machine, monkeypatch, caplog):
    monkeypatch.setattr(goal, "usable_bytes", lambda _device: 1)
    torch.manual_seed(0)
    net, x = nn.Sequential(*(Block() for _ in range(N_BLOCKS))), torch.randn(ROWS, WIDTH)
    expected = step(net, x)
    with cswap.install(net, fit="device", min_bytes=0) as handle:
        for _ in range(24):  # the peak of each plan tells at once, and not in its next look
            assert all(map(torch.equal, step(net, x), expected))
            machine.cuda.synchronize()
        found = handle.goal
        assert found is not None
        assert found.phase == "unreachable"
        assert found.actions.total() > found.actions["keep"]
        assert handle.stats.fallbacks == 0
    assert sum("The device has 1 B for it" in record.message for record in caplog.records) == 1


@pytest.mark.slow
def test_a_smaller_batch_fits_the_device_again(machine, monkeypatch):
    torch.manual_seed(0)
    net = nn.Sequential(*(Block() for _ in range(N_BLOCKS)))
    small, large = torch.randn(ROWS // 8, WIDTH), torch.randn(4 * ROWS, WIDTH)
    usable = 2 * sum(p.nbytes for p in net.parameters()) + 2 * saved_bytes(net, small)
    monkeypatch.setattr(goal, "usable_bytes", lambda _device: usable)
    phases = []
    with cswap.install(net, fit="device", min_bytes=0) as handle:
        for x, n in ((large, 48), (small, 40)):
            for _ in range(n):
                step(net, x)
                machine.cuda.synchronize()
            assert handle.goal is not None
            phases.append(handle.goal.phase)
        before = handle.stats.swapped
        step(net, small)
        assert handle.stats.swapped == before
    assert phases == ["unreachable", "obeying"]


@pytest.mark.parametrize(("fraction", "usable"), [(1.0, 80), (0.5, 50), (None, 80)])
def test_a_tenth_of_the_free_memory_is_left(monkeypatch, fraction, usable):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _device: (60 * MIB, 100 * MIB))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda _device: 20 * MIB)
    name = "get_per_process_memory_fraction"
    if fraction is None:  # an older torch
        monkeypatch.delattr(torch.cuda, name, raising=False)
    else:
        monkeypatch.setattr(torch.cuda, name, lambda _device: fraction, raising=False)
    assert whole_device.usable_bytes(torch.device("cuda")) == int(0.9 * usable * MIB)
