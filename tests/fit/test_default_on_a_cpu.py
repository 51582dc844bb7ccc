"""Without options, a model on a CPU has the goal of the least memory at a tenth more time."""

from __future__ import annotations

import gc
import threading
import time
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.optimizer import _global_optimizer_post_hooks

import cswap
from cswap.fit.drift import Drift
from cswap.fit.pace import Pace
from tests.engine.engines import assert_empty

STEPS = 24


def perceptron(width=64):
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (nn.Linear(width, width), nn.GELU())]
    return nn.Sequential(*layers)


class TwoOutputs(nn.Module):
    """The second output, and indices, are in no loss."""

    def __init__(self):
        super().__init__()
        self.trunk, self.main, self.other = perceptron(), perceptron(), perceptron()

    def forward(self, x):
        z = self.trunk(x)
        return self.main(z), self.other(z), z.argsort(1), z.max(1)[1]


def gradients(model, loss):
    return torch.autograd.grad(loss(), [*model.parameters()], allow_unused=True)


def equal(found, wanted):
    return all(
        a is b if a is None or b is None else torch.equal(a, b)
        for a, b in zip(found, wanted, strict=True)
    )


def planned(handle):
    """Wait for the plan that is being made."""
    planning = handle._fit and handle._fit._planning
    while planning is not None and not planning.done:
        time.sleep(0.001)


def train(handle, model, loss, wanted, n=STEPS):
    for _ in range(n):
        assert equal(gradients(model, loss), wanted)
        planned(handle)


def squared(model, x):
    """A loss of this model, and its gradients without cswap."""

    def loss():
        return model(x).square().sum()

    return loss, gradients(model, loss)


def test_a_plan_is_obeyed_and_values_are_those_without_it():
    model, x = perceptron(), torch.randn(64, 64, requires_grad=True)

    def loss():
        return model(x).square().sum()

    wanted = gradients(model, loss)
    handle: Any
    with cswap.install(model, min_bytes=0, slowdown=50.0) as handle:
        assert handle.goal is None  # nobody knows yet where the model is
        train(handle, model, loss, wanted)
        goal: Any = handle.goal
        assert (goal.asked_bytes, goal.asked_slowdown, goal.phase) == (None, 50.0, "obeying")
        assert goal.actions.total() > goal.actions["keep"]
        assert handle.stats.fallbacks == 0
        fit = handle._fit
    assert not fit.used._known
    x = None  # type: ignore[assignment]
    gc.collect()
    assert_empty(handle.engine)


def test_the_default_is_a_tenth():
    model = perceptron()
    with cswap.install(model, min_bytes=0) as handle:
        model(torch.randn(4, 64)).sum().backward()
        assert handle.goal is not None
        assert handle.goal.asked_slowdown == 1.1
        assert handle.goal.phase == "exploring"


def test_what_backward_does_not_ask_for_is_no_drift(monkeypatch):
    drifted, of_one = [], Drift.in_step

    def noted(self, step, plan):
        drifted.append(of_one(self, step, plan))
        return drifted[-1]

    monkeypatch.setattr(Drift, "in_step", noted)
    model, x = TwoOutputs(), torch.randn(32, 64)

    def loss():
        return model(x)[0].square().sum()

    wanted = gradients(model, loss)
    handle: Any
    with cswap.install(model, min_bytes=0, slowdown=50.0) as handle:
        train(handle, model, loss, wanted, 2 * STEPS)
        assert handle.goal.phase == "obeying"
        assert drifted
        assert not any(drifted)
        saved = handle._fit._problem.saved
        others = [one for one in saved if one.names[0].scope.startswith("other")]
        assert others
        assert {one.first_use for one in others} == {max(one.first_use for one in saved)}


def test_a_schedule_is_obeyed_from_the_first_step_on(tmp_path):
    model, x, path = perceptron(), torch.randn(64, 64), tmp_path / "schedule.json"

    loss, wanted = squared(model, x)
    with cswap.install(model, min_bytes=0, slowdown=50.0) as first:
        train(first, model, loss, wanted)
        assert first.schedule is not None
        first.schedule.save(path)
    with cswap.install(model, min_bytes=0, slowdown=50.0, schedule=path) as handle:
        for _ in range(4 * STEPS):
            assert equal(gradients(model, loss), wanted)
            assert handle.goal is not None
            assert handle.goal.phase == "obeying"


def test_several_forwards_before_a_backward_end_it_quietly(caplog):
    model, x = perceptron(), torch.randn(64, 64)

    def loss():
        return model(x).square().sum() + model(2 * x).sum()

    wanted = gradients(model, loss)
    handle: Any
    with cswap.install(model, min_bytes=0) as handle:
        train(handle, model, loss, wanted)
        assert handle.goal.phase == "given up"
        assert handle.stats.fallbacks == 0
        x = None  # type: ignore[assignment]
        gc.collect()
        assert handle.stats.device_bytes == 0
    assert not [one for one in caplog.records if one.levelname == "WARNING"]


def test_steps_that_are_skipped_now_and_then_do_not_end_it():
    model, x = perceptron(), torch.randn(64, 64)

    loss, wanted = squared(model, x)
    handle: Any
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(6):
            kept = model(x)  # as of a batch whose loss is not finite
            train(handle, model, loss, wanted, 1)
            del kept
            train(handle, model, loss, wanted, 4)
        assert handle.goal.phase == "obeying"
        assert not handle._fit._chooser.several_forwards


def test_threads_that_save_tensors_end_it_and_values_stay_right():
    model, x = perceptron(), torch.randn(64, 64)

    loss, wanted = squared(model, x)
    right: list[bool] = []
    handle: Any

    def trains():
        right.extend(equal(gradients(model, loss), wanted) for _ in range(STEPS))

    with cswap.install(model, min_bytes=0) as handle:
        threads = [threading.Thread(target=trains) for _ in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        train(handle, model, loss, wanted)
        assert handle.goal.phase in ("given up", "obeying", "planning", "exploring")
    assert right
    assert all(right)


def test_gradients_inside_of_an_evaluation_are_of_no_step():
    class Force(nn.Module):
        def __init__(self):
            super().__init__()
            self.energy = perceptron()

        def forward(self, x):
            with torch.enable_grad():
                x = x.detach().requires_grad_()
                (found,) = torch.autograd.grad(self.energy(x).sum(), x, create_graph=self.training)
            return found

    model, x = Force(), torch.randn(16, 64)

    loss, wanted = squared(model, x)
    handle: Any
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(STEPS):
            train(handle, model, loss, wanted, 1)
            with torch.no_grad():
                model.eval()
                for _ in range(4):
                    model(x)
                    step = handle._fit._chooser.step
                    assert not step.laps
                    assert not step.seen
                model.train()
        assert handle.goal.phase == "obeying"


def test_a_model_that_is_dropped_leaves_no_hook_of_optimizers():
    before = len(_global_optimizer_post_hooks)
    for _ in range(3):
        model = perceptron()
        cswap.install(model, min_bytes=0)
        model(torch.randn(4, 64)).sum().backward()
        assert len(_global_optimizer_post_hooks) > before
        del model
        gc.collect()
    assert len(_global_optimizer_post_hooks) == before


@pytest.mark.parametrize(
    ("lossy", "deterministic", "ranks", "has_goal"),
    [
        ("off", True, False, True),
        ("int8", False, False, True),
        ("int8", True, False, False),
        ("int8", False, True, False),
    ],
)
def test_no_measured_time_chooses_what_is_rounded(
    lossy, deterministic, ranks, has_goal, monkeypatch
):
    monkeypatch.setattr("cswap.ranks.are_several", lambda: ranks)
    monkeypatch.setattr(torch, "are_deterministic_algorithms_enabled", lambda: deterministic)
    model = perceptron()
    with cswap.install(model, lossy=lossy, slowdown=1.2, min_bytes=0) as handle:
        model(torch.randn(4, 64)).sum().backward()
        assert (handle.goal is not None) == has_goal


@pytest.mark.parametrize("make", [nn.GELU, lambda: nn.Linear(4, 4, device="meta")])
def test_a_model_on_no_device_or_an_odd_one_has_none(make):
    model = nn.Sequential(make())
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    with cswap.install(model, min_bytes=0) as handle:
        model(torch.randn(4, 4, device=device, requires_grad=True)).sum().backward()
        assert handle.goal is None


class Apart(torch.autograd.Function):
    """Backward asks for all tensors at once, as that of a compiled graph does."""

    @staticmethod
    def forward(ctx, x):
        made = [x * n for n in range(1, 5)]
        ctx.save_for_backward(*made)
        return sum(made)

    @staticmethod
    def backward(ctx, gradient):
        return sum(n * gradient for n, _ in enumerate(ctx.saved_tensors, 1))


def test_a_node_that_asks_for_several_tensors_holds_all_of_them_to_its_end():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 64)

        def forward(self, x):
            return Apart.apply(self.layer(x))

    model, x = Net(), torch.randn(64, 64)

    loss, wanted = squared(model, x)
    handle: Any
    with cswap.install(model, min_bytes=0) as handle:
        train(handle, model, loss, wanted)
        assert handle.goal.phase == "obeying"
        apart = [one for one in handle._fit._problem.saved if "layer" not in one.names[0].scope]
        assert len(apart) >= 4
        assert len({one.last for one in apart}) == 1
        assert len({one.first_use for one in apart}) == len(apart)


def test_parts_that_count_for_themselves_are_known_for_parts_of_one_storage():
    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = nn.Linear(64, 192)

        def forward(self, x):
            one, two, _ = torch.unsafe_chunk(self.layer(x), 3, 1)
            three = torch.unsafe_chunk(self.layer(2 * x), 3, 1)[0]
            return one.sin() + two.sin() + three.sin()

    model, x = Net(), torch.randn(64, 64)

    loss, wanted = squared(model, x)
    handle: Any
    with cswap.install(model, min_bytes=0) as handle:
        train(handle, model, loss, wanted)
        one, two, three = (s.part_of for s in handle._fit._problem.saved if s.part_of)
        assert one == two != three
        assert handle.goal.phase == "obeying"


@pytest.mark.parametrize("kind", ["cpu", "cuda"])
def test_no_time_at_all_is_no_share_of_it(kind):
    pace = Pace(kind)
    pace.plain_s = 1.0
    pace._quotients.extend(3 * [1.3])
    pace._has_looked = True
    assert not pace.changes(1.0)
    assert pace.allowed_s(1.0) == 0.0


@pytest.mark.parametrize(("took", "changes"), [(1.05, True), (1.07, False), (1.08, True)])
def test_steps_may_take_three_quarters_of_a_tenth(took, changes):
    """By what is measured. The first plan has half of that, and the next one more, or less."""
    pace = Pace("cpu")
    pace.plain_s = 1.0
    assert pace.allowed_s(1.1) == pytest.approx(0.0375)
    pace._quotients.extend(3 * [took])
    pace._has_looked = True
    assert pace.changes(1.1) == changes
    assert (pace.allowed_s(1.1) - 0.0375) * (1.07 - took) >= 0
