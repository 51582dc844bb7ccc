"""Goals that are held by small models on a CPU."""

from __future__ import annotations

import copy
import re
import threading
from contextlib import nullcontext

import pytest
import torch

import cswap
from cswap.config import parse_bytes
from cswap.errors import ConfigError, GoalError
from cswap.fit.pace import FIRST_SHARE

STEPS = 12


def train(training, n=STEPS):
    for _ in range(n):
        training.step()


def is_held(training, handle):
    """Whether the plan in force is measured to be within the goal; it may have just been made."""
    for _ in range(4):
        if handle.goal.measured_bytes is None:
            training.step()
    assert handle.goal.phase == "obeying"
    return handle.goal.held


@pytest.mark.sampled
@pytest.mark.parametrize("share", [0.75, 0.5])
def test_a_goal_is_held_and_gradients_keep_their_bits(
    training, sizes, install, make_training, share
):
    resident, saved = sizes(training)
    mine, plain = (make_training(training.kind) for _ in range(2))
    handle = install(mine.model, fit=int(resident + share * saved))
    for n in range(STEPS):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
        assert all(map(torch.equal, mine.state(), plain.state()))
    assert is_held(mine, handle)
    goal = handle.goal
    assert goal.measured_bytes <= goal.asked_bytes
    assert goal.resident_bytes == resident
    assert set(goal.actions) - {"keep"}
    assert handle.stats.fallbacks == 0
    handle.engine.collect()
    assert handle.stats.host_bytes == 0
    assert handle.stats.device_bytes <= mine.x.nbytes + 1024  # the input that backward has kept


def test_another_meter_measures_the_same_peak(make_training, install):
    pytest.importorskip("sklearn")
    from bench.fit.models import WithLoss
    from bench.workloads.modes import held
    from bench.workloads.saved_bytes import SavedBytes

    net = make_training("blocks").model
    model = WithLoss(net)
    batch = torch.randn(128, 32), torch.randint(32, (128,))

    def step():
        model.zero_grad()
        model(*batch).backward()

    def peak(handle):
        owned = [*model.parameters(), *model.buffers()]
        meter = SavedBytes(owned, batch, lambda: held(handle))
        model.probe = meter.watch
        step()
        model.probe = nullcontext
        return meter.curve.peak

    saved = peak(None)
    resident = 2 * sum(p.nbytes for p in model.parameters())
    handle = install(model, fit=resident + saved // 2)
    for _ in range(STEPS):
        step()
    assert handle.goal.phase == "obeying"
    assert peak(handle) <= saved // 2
    for _ in range(STEPS):  # a plan that was just made anew, by measured times, has no peak yet
        if handle.goal.measured_bytes is not None:
            break
        step()
    inputs = sum(x.nbytes for x in batch)
    assert abs(handle.goal.measured_bytes - resident - peak(handle)) <= inputs + 4096


def test_memory_that_backward_does_not_read_counts_while_it_is_there(install):
    # Most of the step is the input of the pooling, whose backward gets memory of its layout.
    conv = torch.nn.Conv2d(3, 32, 3)
    net = torch.nn.Sequential(conv, torch.nn.MaxPool2d(2), torch.nn.Conv2d(32, 8, 3))
    images, pooled_bytes = torch.randn(8, 3, 34, 34), 8 * 32 * 32 * 32 * 4
    handle = install(net, fit=3 * pooled_bytes)
    for _ in range(STEPS):
        net.zero_grad()
        net(images).sum().backward()
    assert handle.goal.phase == "obeying"
    assert pooled_bytes <= handle.goal.measured_bytes < 2 * pooled_bytes
    assert handle.stats.device_bytes <= images.nbytes  # which are still there


def test_products_are_computed_again_under_a_goal_only(make_training, sizes, install, request):
    mine, plain = make_training("blocks"), make_training("blocks")
    resident, saved = sizes(mine)
    handle = install(mine.model, fit=int(resident + 0.5 * saved))
    for n in range(STEPS):
        for one in (mine, plain):
            torch.manual_seed(n)
            one.gradients = one.step()
        assert all(map(torch.equal, mine.gradients, plain.gradients))
    assert is_held(mine, handle)
    trials = handle.engine._state.recomputer.trials.by_site
    assert any("addmm" in operator for (_, operator, _), _, _ in trials)
    assert handle.goal.actions["remat"] > 0
    handle.remove()
    request.getfixturevalue("by_price")
    with cswap.install(mine.model, min_bytes=0, slowdown=1e6) as after:  # without a goal
        for _ in range(4):
            mine.step()
        trials = after.engine._state.recomputer.trials.by_site
        assert trials
        assert not any("addmm" in operator for (_, operator, _), _, _ in trials)


def test_the_largest_batch_is_predicted(training, sizes, make_training, install):
    limit = sum(sizes(training))
    handle = install(training.model, fit=limit)
    assert handle.largest_batch() is None  # before there is a plan
    train(training)
    largest = handle.largest_batch()
    assert largest > 1.5
    for share, holds in ((0.75, True), (1.5, False)):
        mine = make_training(training.kind)
        rows = int(share * largest * len(training.x))
        mine.x = torch.randn(rows, *training.x.shape[1:])
        other = install(mine.model, fit=limit)
        with nullcontext() if holds else pytest.raises(GoalError):
            train(mine, 2 * STEPS)
        if holds:
            assert is_held(mine, other)


def test_second_forwards_of_named_modules_count(make_training, install):
    training = make_training("blocks")
    handle = install(training.model, fit="min", slowdown=3.0, recompute="[0-3]")
    train(training)
    goal = handle.goal
    assert goal.phase == "obeying"
    saved = goal.measured_bytes - goal.resident_bytes
    assert abs(goal.measured_bytes - goal.predicted_bytes) <= 0.1 * saved


def test_named_modules_are_not_advised_where_they_are_named(make_training, sizes, install):
    training = make_training("blocks")
    resident, _ = sizes(training)
    install(training.model, fit=resident + 1024, recompute="[0-3]")
    with pytest.raises(GoalError) as found:
        train(training, 2 * STEPS)
    assert "recompute" not in str(found.value)


def test_convolutions_are_computed_again(install):
    def net():
        torch.manual_seed(0)
        return torch.nn.Sequential(
            *(torch.nn.Conv2d(3, 16, 3), torch.nn.BatchNorm2d(16), torch.nn.ReLU()),
            *(torch.nn.Conv2d(16, 16, 3, bias=False), torch.nn.BatchNorm2d(16), torch.nn.ReLU()),
            *(torch.nn.Conv2d(16, 4, 3), torch.nn.GELU()),
        )

    mine, plain = net(), net()
    handle = install(mine, fit="min", slowdown=50.0)
    for _ in range(STEPS):
        x = torch.randn(8, 3, 24, 24)
        found = [
            torch.autograd.grad(model(x).square().mean(), [*model.parameters()])
            for model in (mine, plain)
        ]
        assert all(map(torch.equal, *found))
    assert handle.goal.phase == "obeying"
    trials = handle.engine._state.recomputer.trials.by_site
    assert {operator for (_, operator, _), _, _ in trials} >= {"convolution", "batch_norm>relu"}
    assert handle.stats.fallbacks == 0


def test_a_product_of_rows_at_an_address_that_new_memory_never_has(install):
    # Where the sums of products depend on the address, a decoded input would change their bits.
    torch.manual_seed(0)
    n, data = 4001, torch.randn(8 * 4001, 31).relu()  # rows of 124 bytes
    mine = torch.nn.Sequential(torch.nn.Linear(31, 7), torch.nn.GELU(), torch.nn.Linear(7, 1))
    plain = copy.deepcopy(mine)
    install(mine, fit="min")
    for i in range(8):
        x = data[i * n : (i + 1) * n]
        found = [
            torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
            for model in (mine, plain)
        ]
        assert all(map(torch.equal, *found))


def test_a_goal_out_of_reach_is_an_error_that_names_the_smallest_that_is_not(
    training, sizes, install
):
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.01 * saved))
    with pytest.raises(GoalError, match=r"smallest goal that can be reached is fit=") as e:
        train(training)
    (named,) = re.findall(r'fit="([^"]+)"', str(e.value))  # one number, which the option takes
    assert 0 <= parse_bytes(named, "fit") - e.value.smallest_bytes <= 0.1 * 2**20
    assert str(e.value).count("iB") == 3  # beside it, what was asked for and what is resident
    assert handle.goal.phase == "unreachable"
    assert handle.goal.held is None
    train(training, 2)  # once is enough
    again = install(training.model, fit=e.value.smallest_bytes)
    train(training)
    assert again.goal.phase == "obeying"
    assert is_held(training, again)


def test_parameters_alone_above_the_goal_are_refused_before_anything_changes(make_training):
    training = make_training("blocks")
    before = {name: dict(m.__dict__) for name, m in training.model.named_modules()}
    with pytest.raises(GoalError, match=r"buffers and gradients alone take .* Ask for more") as e:
        cswap.install(training.model, fit=1000)
    assert "can be reached" not in str(e.value)  # nobody knows yet
    assert {name: dict(m.__dict__) for name, m in training.model.named_modules()} == before


def test_the_least_memory_within_a_slowdown(make_training, sizes, install, monkeypatch):
    # No corrections by measured time: the machine may be busy.
    monkeypatch.setattr("cswap.fit.pace.Pace.changes", lambda *_: False)
    training = make_training("blocks")
    resident, saved = sizes(training)
    peaks = {}
    for slowdown in (1.0, 50.0):
        handle = install(training.model, fit="min", slowdown=slowdown)
        train(training)
        goal = handle.goal
        assert goal.phase == "obeying"
        assert goal.held is None
        assert goal.predicted_slowdown <= slowdown + 1e-6
        peaks[slowdown] = goal.measured_bytes
    assert peaks[1.0] == resident + saved
    assert peaks[50.0] < resident + 0.7 * saved


def test_a_step_that_is_too_slow_gets_a_plan_with_less_time(make_training, install, monkeypatch):
    training, seconds = make_training("blocks"), {True: 1.0, False: 1.0}
    monkeypatch.setattr("cswap.fit.seen.Step.step_s", property(lambda self: seconds[self.looked]))
    handle = install(training.model, fit="min", slowdown=1.5)
    share = []

    def trains(looked, others, n):
        seconds.update({True: looked, False: others})
        train(training, n)
        share.append(handle._fit._pace.share)

    trains(1.0, 1.0, 160)
    plans = handle.goal.plans
    assert plans > 1  # there was time left
    trains(3.0, 3.0, 40)  # the machine is busy, and both take longer
    assert handle.goal.plans == plans
    trains(3.0, 9.0, 40)
    assert handle.goal.plans > plans
    trains(1.0, 1.0, 160)
    assert FIRST_SHARE["cpu"] < share[0] == share[1] == 1.0
    assert share[2] < 0.5 < 0.8 < share[3] < 1.0


def test_a_larger_batch_gets_a_plan_of_its_size_that_holds(make_training, sizes, install):
    training = make_training("blocks")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.6 * saved))
    train(training, 12)
    assert handle.goal.phase == "obeying"
    plans, raw_bytes = handle.goal.plans, handle._fit._plan.raw_bytes
    training.x = torch.cat([training.x, training.x[: len(training.x) // 2]])
    for _ in range(STEPS):
        training.step()
        assert handle.goal.phase == "obeying"
    assert handle.goal.plans > plans
    assert handle._fit._plan.raw_bytes > 1.3 * raw_bytes  # half of the batch came on top
    assert is_held(training, handle)


def test_a_peak_above_the_goal_makes_the_next_plan_tighter(
    make_training, sizes, install, monkeypatch
):
    training = make_training("blocks")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.75 * saved))
    train(training, 8)
    plans, predicted = handle.goal.plans, handle.goal.predicted_bytes
    take = handle.engine.counters.take_peak
    more = int(0.1 * saved)
    monkeypatch.setattr(handle.engine.counters, "take_peak", lambda: take() + more)
    train(training, 12)
    assert handle.goal.plans > plans
    assert is_held(training, handle)
    assert handle.goal.predicted_bytes <= handle.goal.asked_bytes
    assert predicted <= handle.goal.asked_bytes


def test_validation_on_the_way_is_no_step(make_training, sizes, install):
    training = make_training("blocks")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.6 * saved))
    for _ in range(STEPS):
        training.step()
        with torch.no_grad():
            training.model(training.x)
        training.model(training.x)  # with a graph, and no backward
    assert handle.goal.phase == "obeying"
    assert is_held(training, handle)


def test_two_backwards_of_one_graph(make_training, sizes, install):
    training = make_training("blocks")
    resident, saved = sizes(training)
    install(training.model, fit=int(resident + 0.5 * saved))
    train(training, 10)
    training.optimizer.zero_grad()
    torch.manual_seed(7)
    loss = training.model(training.x).square().mean()
    loss.backward(retain_graph=True)
    first = [p.grad.clone() for p in training.model.parameters()]
    training.optimizer.zero_grad()
    loss.backward()
    assert all(map(torch.equal, first, [p.grad for p in training.model.parameters()]))


def test_after_removal_the_model_is_as_it_was(make_training, sizes):
    training = make_training("blocks")
    resident, saved = sizes(training)
    before = {name: set(m.__dict__) for name, m in training.model.named_modules()}
    hooks = [len(m._forward_hooks) for m in training.model.modules()]
    for steps in (0, 2, 10):
        handle = cswap.install(training.model, fit=int(resident + 0.5 * saved), min_bytes=0)
        train(training, steps)
        handle.remove()
        handle.remove()
        assert {name: set(m.__dict__) for name, m in training.model.named_modules()} == before
        assert [len(m._forward_hooks) for m in training.model.modules()] == hooks
    training.step()


def test_several_threads_end_the_goal_in_words(make_training, sizes, install, caplog):
    training = make_training("blocks")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.6 * saved))
    training.step()

    def other():
        training.model(training.x).sum().backward()

    out = training.model(training.x)
    thread = threading.Thread(target=other)
    thread.start()
    thread.join()
    out.sum().backward()
    with caplog.at_level("WARNING", logger="cswap"):
        train(training, 2)
    assert handle.goal.phase == "given up"
    assert "several threads" in caplog.text
    train(training, 2)
    handle.remove()


def test_a_planner_that_fails_ends_the_goal_in_words(make_training, install, caplog, monkeypatch):
    def fails(*_):
        raise RuntimeError("no solver today")

    monkeypatch.setattr("cswap.fit.controller.found_for", fails)
    training = make_training("blocks")
    handle = install(training.model, fit="1GiB")
    train(training, 8)
    assert handle.goal.phase == "given up"
    assert "no solver today" in caplog.text


def test_without_remat_only_codecs_are_used(make_training, sizes, install):
    training = make_training("convolutions")
    resident, saved = sizes(training)
    handle = install(training.model, fit=int(resident + 0.95 * saved), remat=False)
    train(training)
    assert "remat" not in handle.goal.actions


def test_a_lossy_codec_reaches_what_lossless_ones_do_not(make_training, sizes, install):
    training = make_training("blocks")
    resident, saved = sizes(training)
    fit = int(resident + 0.6 * saved)
    install(training.model, fit=fit, remat=False)
    with pytest.raises(GoalError):
        train(training)
    handle = install(training.model, fit=fit, remat=False, lossy="int8", guard_every=0)
    train(training)
    assert is_held(training, handle)
    assert any("int8" in action for action in handle.goal.actions)


def test_the_goal_says_what_it_is(make_training, install):
    training = make_training("blocks")
    assert cswap.install(training.model).goal is None
    handle = install(training.model, fit="1GiB")
    assert str(handle.goal) == "goal 1.0 GiB: exploring"
    train(training, 8)
    text = str(handle.goal)
    assert text.startswith("goal 1.0 GiB: obeying; predicted ")
    assert "saved bytes plus parameters, buffers, gradients and optimizer state" in text
    assert " keep" in text
    assert "the least memory at 1.1" in str(install(training.model, fit="min").goal)


MODEL = torch.nn.Linear(2, 2)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"fit": "much"}, "fit='much': must be bytes"),
        ({"fit": 0}, "fit=0: must be bytes above 0"),
        ({"fit": -1}, "fit=-1: must be bytes"),
        ({"fit": 1.5}, "fit=1.5: must be bytes above 0"),
        ({"fit": True}, "fit=True: must be bytes"),
        ({"fit": "min", "slowdown": 0.9}, "slowdown=0.9: must be at least 1"),
        ({"fit": "min", "slowdown": "fast"}, "slowdown='fast': must be a number"),
        ({"slowdown": 0.9}, "slowdown=0.9: must be at least 1"),
        ({"fit": "1GiB", "slowdown": 1.2}, "such a goal already takes the least time"),
        ({"fit": "device", "slowdown": 1.2}, "such a goal already takes the least time"),
        ({"fit": "device", "budget": "1MiB"}, "budget=1048576 with fit='device'"),
        ({"fit": "device"}, "fit='device': the model is on cpu.*Move the model to a GPU"),
        ({"fit": "1GiB", "budget": "1MiB"}, "budget=1048576 with fit=1073741824"),
        ({"fit": "1GiB", "keep_last": 1}, "keep_last=1 with fit="),
        ({"fit": "1GiB", "policy": "raw"}, "policy='raw' with fit="),
        ({"fit": "1GiB", "verify": True}, "verify=True with fit="),
        ({"fit": "1GiB", "plan": {"version": 1, "decisions": {}}}, "with fit="),
    ],
)
def test_wrong_words_are_refused_before_anything_changes(options, words):
    before = set(MODEL.__dict__)
    with pytest.raises(ConfigError, match="(?s)" + words.replace("(", r"\(")):
        cswap.install(MODEL, **options)
    assert set(MODEL.__dict__) == before


def test_a_goal_needs_a_model_on_one_device():
    with pytest.raises(ConfigError, match="needs a model"):
        cswap.install(fit="1GiB")
    with pytest.raises(ConfigError, match="needs a model"):
        cswap.swapping(fit="1GiB")
    with pytest.raises(ConfigError, match="on one device, and are on none"):
        cswap.install(torch.nn.ReLU(), fit="1GiB")
    mixed = torch.nn.Sequential(torch.nn.Linear(2, 2), torch.nn.Linear(2, 2, device="meta"))
    with pytest.raises(ConfigError, match="on cpu, meta"):
        cswap.install(mixed, fit="1GiB")


def test_the_environment_takes_the_same_words(monkeypatch):
    monkeypatch.setenv("CSWAP_FIT", "2GiB")
    assert cswap.SwapConfig.resolve().fit == 2 << 30
    monkeypatch.setenv("CSWAP_FIT", "min")
    monkeypatch.setenv("CSWAP_SLOWDOWN", "1.25")
    config = cswap.SwapConfig.resolve()
    assert (config.fit, config.slowdown) == ("min", 1.25)
    monkeypatch.setenv("CSWAP_FIT", "device")
    assert cswap.SwapConfig.resolve().fit == "device"


def test_tensors_inside_of_vmap_are_left_alone(install):
    net = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Sequential(torch.nn.Linear(8, 8)))

    class PerSample(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.net = net

        def forward(self, x):
            return torch.vmap(lambda row: self.net(row).tanh())(x)

    model = PerSample()
    handle = install(model, fit="1GiB")
    for _ in range(8):
        model(torch.randn(16, 8)).sum().backward()
    assert handle.stats.fallbacks == 0
