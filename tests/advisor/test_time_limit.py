"""The limit of the time that swapping adds to a CPU's step."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cswap
from cswap.advisor.advisor import NO_TIME, Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.live_costs import KEEP
from cswap.advisor.time_limit import LEAST_S, MEASURED_SHARE, Gain, Spent, TimeLimit
from cswap.config import SwapConfig
from cswap.errors import ConfigError

MIB = 1 << 20
STEP_S = 1.0
SLOWDOWN = 1.1
LIMIT_S = MEASURED_SHARE * (SLOWDOWN - 1) * STEP_S  # nearly: the step's own part is a bit shorter


class Steps:
    """Steps of STEP_S, in which each tensor takes ``factor`` times its predicted time."""

    def __init__(self, gains, factor=1.0, staying_s=0.0):
        self.limit, self.gains, self.factor = TimeLimit(SLOWDOWN), gains, factor
        self.now_s = self.leaving_s = self.staying_s = 0.0
        self.each_staying_s = staying_s
        for position, gain in enumerate(gains):
            self.limit.note(position, gain)

    @property
    def leaving(self):
        return [n for n in range(len(self.gains)) if not self.limit.keeps(n)]

    @property
    def step_s(self):
        return self.factor * sum(self.gains[n].seconds for n in self.leaving)

    def run(self, steps=4):
        for _ in range(steps):
            self.limit.begin_step(self.now_s, Spent(self.leaving_s, self.staying_s, self.now_s))
            self.leaving_s += self.step_s
            self.staying_s += self.each_staying_s
            self.now_s += STEP_S
        self.limit.begin_step(self.now_s, Spent(self.leaving_s, self.staying_s, self.now_s))
        self.limit.look_back()


def alike(count, seconds, nbytes=MIB):
    return [Gain(seconds, nbytes)] * count


def test_all_leave_below_the_limit():
    steps = Steps(alike(10, LIMIT_S / 20))
    steps.run()
    assert steps.leaving == list(range(10))


def test_those_that_save_the_fewest_bytes_for_a_second_stay():
    gains = [Gain(LIMIT_S / 4, (n % 5 + 1) * MIB) for n in range(10)]
    steps = Steps(gains)
    steps.run()
    assert {gains[n].nbytes for n in steps.leaving} <= {5 * MIB, 4 * MIB}
    assert 2 <= len(steps.leaving) <= 4


@given(factor=st.floats(1.0, 9.0), count=st.integers(8, 200))
def test_measured_times_correct_predicted_ones(factor, count):
    steps = Steps(alike(count, LIMIT_S / 100), factor)
    for _ in range(6):
        steps.run()
    assert steps.step_s <= LIMIT_S
    each_s = factor * LIMIT_S / 100
    assert len(steps.leaving) == count or steps.step_s + each_s > 0.7 * LIMIT_S


def test_the_hooks_of_tensors_that_stay_count():
    steps = Steps(alike(100, LIMIT_S / 50), staying_s=LIMIT_S / 2)
    steps.run()
    assert 0.3 * LIMIT_S < steps.step_s < 0.5 * LIMIT_S


def test_choices_stay_while_the_time_is_near_the_limit():
    steps = Steps(alike(100, LIMIT_S / 50))
    steps.run()
    before = steps.leaving
    for factor in (0.95, 1.0, 0.9):
        steps.factor = factor
        steps.run()
        assert steps.leaving == before


def test_tensors_leave_again_when_there_is_time():
    steps = Steps(alike(100, LIMIT_S / 50), factor=5.0)
    steps.run()
    few = len(steps.leaving)
    steps.factor = 1.0
    for _ in range(8):
        steps.run()
    assert len(steps.leaving) > 2 * few
    assert steps.step_s <= LIMIT_S


def test_a_step_without_a_backward_says_nothing():
    limit = TimeLimit(SLOWDOWN)
    limit.note(0, Gain(1.0, MIB))
    for n in range(4):
        limit.begin_step(float(n), Spent(float(n), 0.0, 0.0))
    limit.look_back()
    assert not limit.keeps(0)


def test_small_steps_may_swap_for_some_milliseconds():
    limit = TimeLimit(SLOWDOWN)
    for position in range(10):
        limit.note(position, Gain(LEAST_S / 20, MIB))
    for n in range(5):  # half of LEAST_S, and half of the step
        limit.begin_step(n * LEAST_S, Spent(n * LEAST_S / 2, 0.0, n * LEAST_S))
    limit.look_back()
    assert not any(map(limit.keeps, range(10)))


def test_a_tensor_that_is_no_longer_worth_its_time_is_forgotten():
    steps = Steps(alike(4, LIMIT_S))
    for position in range(3):
        steps.limit.note(position, None)
    steps.run()
    assert not steps.limit.keeps(0)


@pytest.mark.parametrize(
    ("options", "limited"),
    [
        ({}, True),
        ({"lossy": "int8"}, False),
        ({"lossy": "int8", "slowdown": 1.2}, True),
        ({"slowdown": 1.5}, True),
        ({"policy": "raw"}, False),
        ({"codec": "zvc"}, False),
        ({"host_limit": "1GiB"}, False),
        ({"budget": "1GiB"}, False),
        ({"fit": "min"}, False),
    ],
)
def test_who_asks_for_a_limit(options, limited):
    assert (TimeLimit.of(SwapConfig(**options)) is not None) == limited


@pytest.mark.parametrize("options", [{"codec": "zvc"}, {"policy": "raw"}, {"budget": "1GiB"}])
def test_a_limit_that_could_not_hold_is_refused(options):
    name = next(iter(options))
    with pytest.raises(ConfigError, match=rf"slowdown=1.2 with {name}=.*Leave slowdown or {name}"):
        cswap.install(torch.nn.Linear(2, 2), slowdown=1.2, **options)


def test_a_device_with_a_link_has_a_price_instead():
    for kind, limited in (("cuda", False), ("cpu", True)):
        advisor = Advisor(SwapConfig(), None)
        limit = advisor.limit
        assert limit is not None
        assert advisor.recomputes(Site(), 0, 64 * MIB, LEAST_S / 5, kind)
        limit.begin_step(0.0, Spent(0.0, 0.0, 0.0))
        limit.begin_step(0.1, Spent(1.0, 0.0, 0.1))
        limit.look_back()
        assert limit.keeps(0) == limited


class Sparse(torch.nn.Module):
    """Nine of ten values become zero: codecs are worth their time."""

    def forward(self, x):
        return torch.relu(x - x.detach().std() * 1.3)


def train(slowdown, monkeypatch, steps=14):
    """Statistics and explanation of steps that would like to swap for longer than they may."""
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), Sparse()) for _ in range(12)]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(1 << 13, 64)
    with cswap.install(model, slowdown=slowdown, remat=False, workers=0) as handle:
        for _ in range(steps):
            model(x).square().mean().backward()
        engine = handle.engine
        return engine.stats, engine.explain(), [p.grad for p in model.parameters()]


def test_an_engine_keeps_the_limit(monkeypatch):
    stats, choices, gradients = train(1.0, monkeypatch)
    free, all_choices, same = train(1e6, monkeypatch)
    assert "slowdown" not in free.kept_by_reason
    assert any(e.codec != KEEP for e in all_choices)
    assert stats.kept_by_reason["slowdown"] > 0
    assert stats.swapped < free.swapped
    assert any(e.reason == NO_TIME and e.codec == KEEP for e in choices)
    assert all(map(torch.equal, gradients, same))


def test_tensors_that_are_computed_again_keep_the_limit_too(monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(
        *(torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(8))
    )
    x = torch.randn(1 << 13, 64)
    with cswap.install(model, slowdown=1.0, workers=0) as handle:
        for _ in range(14):
            model(x).square().mean().backward()
        stats, choices = handle.engine.stats, handle.engine.explain()
    assert stats.kept_by_reason["slowdown"] > 0
    assert all(e.codec == KEEP for e in choices if e.reason == NO_TIME)
    assert any(e.reason == NO_TIME for e in choices)
