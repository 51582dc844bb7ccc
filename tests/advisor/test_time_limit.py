"""The limit of the time that swapping adds to a CPU's step."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import cswap
from cswap.advisor.advisor import WHY_KEPT, Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.gains import DOUBT, GROWTH, Gain
from cswap.advisor.live_costs import KEEP
from cswap.advisor.step_peak import ALIKE
from cswap.advisor.step_reports import LOOK_EVERY
from cswap.advisor.time_limit import (
    FEWEST,
    LEAST_S,
    LOSSY_PATIENCE,
    MEASURED_SHARE,
    NO_TIME,
    UNSEEN_S,
    Moment,
    TimeLimit,
)
from cswap.advisor.time_limit import (
    SLOWDOWN as USUAL,
)
from cswap.config import SwapConfig
from cswap.errors import ConfigError

MIB = 1 << 20
STEP_S = 1.0
SLOWDOWN = 1.1
LIMIT_S = MEASURED_SHARE * (SLOWDOWN - 1) * STEP_S  # nearly: the step's own part is a bit shorter


class Steps:
    """Steps of STEP_S besides swapping, in which a tensor takes ``factor`` times its prediction.

    A tensor that had to stay rests for longer each time, as in the engine.
    """

    def __init__(self, gains, factor=1.0, staying_s=0.0, slowdown=SLOWDOWN, saved=0):
        self.limit, self.gains = TimeLimit(slowdown), gains
        self.factors = [factor] * len(gains)
        self.each_staying_s, self.saved = staying_s, saved
        self.n = 0
        self.now = self.ended = Moment(0.0, 0.0, 0.0)
        self.rests = {}  # position: (step of its end, length)
        self.leaving = list(range(len(gains)))
        for position, gain in enumerate(gains):
            self.limit.note(position, MIB, gain)

    @property
    def leaving_s(self):
        return sum(self.factors[n] * self.gains[n].seconds for n in self.leaving)

    def _leaves(self, position):
        until, length = self.rests.get(position, (0, 1))
        if self.n < until:
            return False
        if self.limit.keeps(position, MIB):
            self.rests[position] = self.n + 1 + 2 * length, min(2 * length, 64)
            return False
        self.rests.pop(position, None)
        return True

    def run(self, steps=4):
        for _ in range(steps):
            self.limit.begin_step(self.now, self.ended)
            if self.n and self.n % 4 == 0:
                self.limit.look_back()
            self.leaving = [n for n in range(len(self.gains)) if self._leaves(n)]
            spent_s = self.leaving_s + self.each_staying_s
            at_s, leaving_s, staying_s, saved = self.now
            self.now = Moment(
                at_s + STEP_S + spent_s,
                leaving_s + self.leaving_s,
                staying_s + self.each_staying_s,
                saved + self.saved,
            )
            if self.leaving:  # only then is the end of backward noticed
                self.ended = self.now
            self.n += 1


def take_steps(limit, step_s, leaving_s):
    """As many steps as a choice needs."""
    for n in range(FEWEST + 1):
        moment = Moment(n * step_s, n * leaving_s, 0.0)
        limit.begin_step(moment, moment)


def alike(count, seconds):
    return [Gain(seconds, MIB) for _ in range(count)]


def test_all_leave_below_the_limit():
    steps = Steps(alike(10, LIMIT_S / 20))
    steps.run(20)
    assert steps.leaving == list(range(10))


def test_a_choice_needs_some_steps():
    limit = TimeLimit(SLOWDOWN)
    limit.note(0, MIB, Gain(2 * LIMIT_S, MIB))
    for n in range(FEWEST + 1):
        moment = Moment(n * 1.2, n * 0.2, 0.0)
        limit.begin_step(moment, moment)
        limit.look_back()
        assert limit.keeps(0, MIB) == (n == FEWEST)


def test_without_a_limit_of_time_no_step_has_to_be_measured():
    limit = TimeLimit(math.inf)
    for position in range(3):
        limit.note(position, MIB, Gain(1.0, MIB))
    limit.gains.step = LOOK_EVERY - 1
    moment = Moment(0.0, 0.0, 0.0)
    limit.begin_step(moment, moment)
    for position in range(3):
        limit.reports.holds((position, MIB), 0)
    limit.begin_step(moment, moment)
    limit.look_back()
    assert limit.staying  # those that lower no peak


def test_those_that_save_the_fewest_bytes_for_a_second_stay():
    gains = [Gain(LIMIT_S / 4, (n % 5 + 1) * MIB) for n in range(10)]
    steps = Steps(gains)
    steps.run(6)
    assert {gains[n].nbytes for n in steps.leaving} == {5 * MIB, 4 * MIB}


@given(factor=st.floats(1.0, 9.0), count=st.integers(8, 200))
def test_measured_times_correct_predicted_ones(factor, count):
    steps = Steps(alike(count, LIMIT_S / 100), factor)
    steps.run(6)
    assert steps.leaving_s <= LIMIT_S * (1 + 1e-9)  # a sum of rounded numbers
    each_s = factor * LIMIT_S / 100
    assert len(steps.leaving) == count or steps.leaving_s + each_s > 0.9 * LIMIT_S


def test_the_hooks_of_tensors_that_stay_count():
    steps = Steps(alike(100, LIMIT_S / 50), staying_s=LIMIT_S / 2)
    steps.run(6)
    assert 0.4 * LIMIT_S < steps.leaving_s <= 0.5 * LIMIT_S


def test_saved_tensors_take_time_that_no_hook_sees():
    steps = Steps(alike(100, LIMIT_S / 50), saved=round(LIMIT_S / 2 / UNSEEN_S))
    steps.run(6)
    assert 0.4 * LIMIT_S < steps.leaving_s < 0.51 * LIMIT_S


def test_choices_stay_while_the_time_is_near_the_limit():
    steps = Steps(alike(100, LIMIT_S / 50.5))
    steps.run(6)
    before = steps.leaving
    for factor in (0.95, 1.0, 0.9):
        steps.factors = [factor] * 100
        steps.run(8)
        assert steps.leaving == before


def test_tensors_leave_again_when_there_is_time():
    steps = Steps(alike(100, LIMIT_S / 50), factor=5.0)
    steps.run(6)
    assert len(steps.leaving) <= 10
    steps.factors = [1.0] * 100
    steps.run(200)
    assert 40 <= len(steps.leaving) <= 50


def test_a_busy_machine_in_the_first_steps_does_not_stop_swapping_for_ever():
    steps = Steps(alike(6, LIMIT_S / 7), factor=10.0)
    steps.run(6)
    assert not steps.leaving  # not even one would fit
    steps.factors = [1.0] * 6
    steps.run(200)
    assert len(steps.leaving) == 6


@pytest.mark.parametrize(("load", "busy_steps"), [(4.0, 8), (8.0, 16), (8.0, 40), (2.0, 160)])
def test_times_of_a_busy_machine_are_not_believed_for_ever(load, busy_steps):
    # Kinds of which none leaves any more: nobody measures how long they take on a calm machine.
    steps = Steps([Gain(LIMIT_S / 12 * (1 + n % 5 / 16), MIB, alike=n % 3) for n in range(10)])
    leaving = []
    for step in range(40 + busy_steps + 240):
        steps.factors = [load if 40 <= step < 40 + busy_steps else 1.0] * 10
        for n in steps.leaving:
            steps.limit.took.append((n, MIB, steps.factors[n] * steps.gains[n].seconds))
        steps.run(1)
        leaving.append(len(steps.leaving))
    assert leaving[39] == 10
    assert min(leaving) < 8
    assert leaving[-1] >= 9


def test_a_time_is_doubted_where_no_tensor_of_its_kind_leaves():
    gains = TimeLimit(SLOWDOWN).gains
    kinds = [Gain(1.0, MIB, kind) for kind in ("a", "a", "b", "c", "c")]
    for position, gain in enumerate(kinds):
        gains.note((position, MIB), gain)
        gains.took((position, MIB), 1.0)
    stay = [(n, MIB) for n in (0, 1, 2, 3)]  # one of "c" leaves; one of "a" stays for nothing
    gains.doubt(frozenset(stay), frozenset(stay[1:2]))
    assert [gain.expected_s for gain in kinds] == [DOUBT, DOUBT, DOUBT, 1.0, 1.0]
    gains.doubt(frozenset(stay), frozenset(stay))  # they would leave for nothing, all of them
    assert [gain.expected_s for gain in kinds] == [DOUBT, DOUBT, DOUBT, 1.0, 1.0]


def test_tensors_that_take_too_long_again_wait_longer_each_time():
    steps = Steps(alike(2, LIMIT_S / 3))
    steps.factors = [1.2, 2.4]  # of the one alone, and of both: far below the limit, and above
    changes, before = [], None
    for step in range(1500):
        steps.run(1)
        if steps.leaving != before:
            changes.append(step)
            before = steps.leaving
    assert len(changes) < 30
    assert max(b - a for a, b in itertools.pairwise(changes)) > 200


def test_tensors_that_no_longer_come_take_no_time():
    steps = Steps(alike(60, LIMIT_S / 100))
    for position in range(60, 260):  # of one longer step; they would come first
        steps.limit.note(position, MIB, Gain(LIMIT_S / 100, 9 * MIB))
    steps.factors = [1.8] * 60
    steps.run(8)
    assert not steps.leaving
    steps.run(400)
    assert len(steps.leaving) > 40


def test_steps_of_two_sizes_have_two_limits():
    limit = TimeLimit(SLOWDOWN)
    limit.note(0, 8 * MIB, Gain(2 * LIMIT_S, 7 * MIB))
    limit.note(0, 1 * MIB, None)  # the same position in a shorter step
    take_steps(limit, 1.2, 0.2)
    limit.look_back()
    assert limit.keeps(0, 8 * MIB)
    assert not limit.keeps(0, 1 * MIB)


def test_small_steps_may_swap_for_some_milliseconds():
    limit = TimeLimit(SLOWDOWN)
    for position in range(10):
        limit.note(position, MIB, Gain(LEAST_S / 20, MIB))
    for n in range(5):  # half of LEAST_S, and half of the step
        moment = Moment(n * LEAST_S, n * LEAST_S / 2, 0.0)
        limit.begin_step(moment, moment)
    limit.look_back()
    assert not any(limit.keeps(n, MIB) for n in range(10))


def test_a_tensor_that_is_no_longer_worth_its_time_is_forgotten():
    steps = Steps(alike(4, LIMIT_S / 2))
    for position in range(3):
        steps.limit.note(position, MIB, None)
    steps.run(6)
    assert not any(steps.limit.is_kept(n, MIB) for n in range(3))


def test_tensors_whose_hooks_take_long_stay_whatever_was_predicted():
    steps = Steps(alike(4, LIMIT_S / 3))
    slow = 1
    steps.factors[slow] = 3.0
    for _ in range(8):
        for n in steps.leaving:
            steps.limit.took.append((n, MIB, steps.factors[n] * steps.gains[n].seconds))
        steps.run(1)
    assert steps.limit.is_kept(slow, MIB)
    assert len(steps.leaving) == 3


def test_one_slow_step_says_little_about_a_tensor():
    limit, gain = TimeLimit(SLOWDOWN), Gain(1.0, MIB)
    limit.note(0, MIB, gain)
    for seconds, expected in ((8.0, 8.0), (2.0, 2.0), (100.0, 2.0 * GROWTH), (1.0, 1.0)):
        limit.gains.took((0, MIB), seconds)
        assert gain.expected_s == expected
    limit.note(0, MIB, again := Gain(3.0, MIB))
    assert again.expected_s == 1.0  # measured times outlive predictions
    limit.gains.took((1, MIB), 1.0)  # of a tensor that is not worth its time


def test_tensors_that_are_alike_share_their_measured_time():
    limit = TimeLimit(SLOWDOWN)
    gains = [Gain(1.0, MIB, alike) for alike in ("GELU", "GELU", "LayerNorm", None, None)]
    for position, gain in enumerate(gains):
        limit.note(position, MIB, gain)
    limit.note(5, 2 * MIB, longer := Gain(2.0, 2 * MIB, "GELU"))
    limit.gains.took((0, MIB), 0.5)
    limit.gains.took((3, MIB), 0.75)
    assert [gain.expected_s for gain in gains] == [0.5, 0.5, 1.0, 0.75, 1.0]
    assert longer.expected_s == 2.0


@pytest.mark.parametrize("order", list(itertools.permutations(range(4)))[::5])
def test_the_first_of_tensors_that_are_worth_about_the_same_leave(order):
    limit = TimeLimit(SLOWDOWN)
    middle_s = MIB * ALIKE**-30.5  # of all times that count as the same
    factors = [0.97, 0.99, 1.01, 1.03]
    for position in order:
        limit.note(position, MIB, Gain(middle_s * factors[3 - position], MIB, alike=position))
    limit.note(4, MIB, Gain(middle_s / 2, MIB, alike=4))  # worth more
    assert limit._beyond(2.6 * middle_s) == {(2, MIB), (3, MIB)}


def test_layers_of_a_kind_are_alike():
    advisor = Advisor(SwapConfig(), None)
    limit = advisor.limit
    assert limit is not None
    kinds = [("GELU", LEAST_S), ("GELU", LEAST_S), ("LayerNorm", LEAST_S / 2)]
    for position, (kind, seconds) in enumerate(kinds):
        advisor.least_price(Site(f"blocks.{position}", kind), position, 64 * MIB, seconds, "cpu")
    limit.took.append((0, 64 * MIB, LEAST_S / 4))  # far less than was predicted
    take_steps(limit, 2 * LEAST_S, 1.2 * LEAST_S)
    limit.look_back()
    assert [limit.is_kept(position, 64 * MIB) for position in range(3)] == [False, False, True]


@pytest.mark.parametrize(
    ("options", "limited"),
    [
        ({}, True),
        ({"lossy": "int8"}, True),  # an infinite one
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


@pytest.mark.parametrize(
    ("options", "patience"),
    [
        ({}, 1.0),
        ({"slowdown": 1.02}, 1.0),
        ({"slowdown": USUAL}, 1.0),
        ({"slowdown": 1 + 3 * (USUAL - 1)}, 3.0),
        ({"slowdown": 1.5, "fit": "min"}, 1.0),
        ({"lossy": "int8"}, LOSSY_PATIENCE),
        ({"lossy": "int8", "slowdown": USUAL}, 1.0),
    ],
)
def test_who_allows_more_time_holds_a_byte_for_worth_more(options, patience):
    usual, price = (Advisor(c, None).price("cpu") for c in (SwapConfig(), SwapConfig(**options)))
    assert price == pytest.approx(patience * usual)


def test_the_price_of_a_byte_has_an_end():
    prices = [Advisor(SwapConfig(slowdown=s), None).price("cpu") for s in (1e3, 1e6)]
    assert prices[0] == prices[1]


def test_on_a_link_the_price_follows_its_time():
    usual, price = (Advisor(SwapConfig(slowdown=s), None).price("cuda") for s in (None, 2.0))
    assert price == usual


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
        assert advisor.least_price(Site(), 0, 64 * MIB, LEAST_S / 5, kind)
        take_steps(limit, 1.1, 1.0)
        limit.look_back()
        assert limit.keeps(0, 64 * MIB) == limited


class Sparse(torch.nn.Module):
    """Nine of ten values become zero: codecs are worth their time."""

    def forward(self, x):
        return torch.relu(x - x.detach().std() * 1.3)


def train(slowdown, monkeypatch, steps=14):
    """Statistics and explanation of steps that would like to swap for longer than they may."""
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    torch.manual_seed(0)
    layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), Sparse()) for _ in range(6)]
    model = torch.nn.Sequential(*layers)
    x = torch.randn(1 << 13, 64)
    with cswap.install(model, slowdown=slowdown, remat=False) as handle:
        run(model, x, steps)
        engine = handle.engine
        return engine.stats, engine.explain(), [p.grad for p in model.parameters()]


def test_an_engine_keeps_the_limit(monkeypatch):
    stats, choices, gradients = train(1.0, monkeypatch)
    free, all_choices, same = train(1e6, monkeypatch)
    assert "slowdown" not in free.kept_by_reason
    assert any(e.codec != KEEP for e in all_choices)
    assert stats.kept_by_reason["slowdown"] > 0
    assert stats.swapped < free.swapped
    assert any(e.reason == WHY_KEPT[NO_TIME] and e.codec == KEEP for e in choices)
    assert all(map(torch.equal, gradients, same))


def gelus(layers=4):
    torch.manual_seed(0)
    pairs = [(torch.nn.Linear(64, 64), torch.nn.GELU()) for _ in range(layers)]
    return torch.nn.Sequential(*(module for pair in pairs for module in pair))


def run(model, x, steps):
    for _ in range(steps):
        model(x).square().mean().backward()


def test_tensors_that_are_computed_again_keep_the_limit_too(monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)  # worth it, if busy or not
    model, x = gelus(), torch.randn(1 << 13, 64)
    with cswap.install(model, slowdown=1.0) as handle:
        run(model, x, 14)
        stats, choices = handle.engine.stats, handle.engine.explain()
    assert stats.kept_by_reason["slowdown"] > 0
    assert all(e.codec == KEEP for e in choices if e.reason == WHY_KEPT[NO_TIME])
    assert any(e.reason == WHY_KEPT[NO_TIME] for e in choices)


def test_two_shapes_in_turns_keep_the_limit(monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-5)  # worth it, if busy or not
    model, batches = gelus(), [torch.randn(1 << 13, 64), torch.randn(1 << 9, 64)]
    with cswap.install(model, slowdown=1.0) as handle:
        for n in range(40):
            before = handle.engine.stats.swapped
            model(batches[n % 2]).square().mean().backward()
        assert handle.engine.stats.swapped == before
        assert handle.engine.stats.kept_by_reason["slowdown"] > 0


def test_forwards_without_a_backward_do_not_count(monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    model, x = gelus(), torch.randn(1 << 13, 64)
    with cswap.install(model, slowdown=50.0) as handle:
        for _ in range(14):
            run(model, x, 1)
            with torch.no_grad():
                for _ in range(30):
                    model(x[:8])
        stats = handle.engine.stats
    assert stats.swapped > 0
    assert "slowdown" not in stats.kept_by_reason


def test_a_budget_is_kept_whatever_it_takes(monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    model, x = gelus(), torch.randn(1 << 13, 64)
    with cswap.install(model, budget=4 * MIB) as handle:
        run(model, x, 14)
        loss = model(x).square().mean()
        assert handle.engine.stats.device_bytes <= 4 * MIB
        loss.backward()


def test_deterministic_algorithms_have_no_limit(monkeypatch):
    monkeypatch.setattr("cswap.advisor.time_limit.LEAST_S", 0.0)
    model, x = gelus(), torch.randn(1 << 13, 64)
    with cswap.install(model, slowdown=1.0) as handle:
        limit = handle.engine.advisor.limit
        assert limit is not None
        run(model, x, 10)
        assert handle.engine.stats.kept_by_reason["slowdown"] > 0
        monkeypatch.setattr("cswap.advisor.advisor.must_agree", lambda **_: True)
        run(model, x, 8)
        assert not any(limit.is_kept(e.position, 2 * MIB) for e in handle.engine.explain())
