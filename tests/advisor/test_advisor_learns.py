"""The advisor over many steps: drift, noise, corrections, the price of a byte."""

from __future__ import annotations

import itertools
import logging
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cswap.advisor import correction
from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.candidates import default_rate, predicted_ratio
from cswap.advisor.correction import TimeCorrections
from cswap.advisor.cost import candidate
from cswap.advisor.live_costs import HYSTERESIS, KEEP, MARGIN
from cswap.advisor.price import LEAST_STEPS, StepClock, fit_price, link_price
from cswap.advisor.rates import (
    DEFAULT_PRICE_S_PER_BYTE,
    HOOKS_S,
    LINK_BYTES_PER_S,
    PRICES_S_PER_BYTE,
)
from cswap.codecs.registry import get_codec
from cswap.codecs.tolerance import EXACT
from cswap.codecs.traits import CodecRate, CodecTraits
from cswap.config import SwapConfig
from cswap.engine.order.looks import last_look
from cswap.errors import ConfigError
from cswap.profiler import profile, profile_all

N = 1 << 16


def sparse(zeros, seed, *, wide=False):
    """Normal values, or such that have every exponent: those gain by their zeros alone."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(N, generator=generator)
    x = torch.exp(20 * x) if wide else x
    return x * (torch.rand(N, generator=generator) >= zeros)


def rate_s(name, profile):
    """Seconds of a round trip by the codec's default rate."""
    return default_rate(get_codec(name), "cpu").device_s(profile)


class Run:
    """One call site over many steps, with encodings really made."""

    def __init__(self, *, may_keep=False, **options):
        self.advisor = Advisor(SwapConfig(**options), None)
        self.may_keep, self.n_steps = may_keep, 0

    def step(self, x, slower=1.0):
        self.n_steps += 1
        self.advisor.begin_step(0.0, last_look(self.n_steps))
        advice = self.advisor.choose(x, Site(), 0, tolerance=EXACT, may_keep=self.may_keep)
        if advice.codec is None:
            return self.settled
        name = advice.codec.name
        advice.note_encoded(name, x.nbytes, advice.codec.encode(x).nbytes)
        advice.note_round_trip(name, slower * rate_s(name, profile(x)))
        return self.settled

    @property
    def settled(self):
        return self.advisor.explain()[0].codec


def costs(x, *names):
    exact = profile_all(x)
    names = names or ("raw", "zvc", "csr", "rle", "zvc+expk", "expk")
    price = DEFAULT_PRICE_S_PER_BYTE
    found = {}
    for n in names:
        ratio = 1.0 if n == KEEP else predicted_ratio(n, exact)
        device_s = 0.0 if n == KEEP else rate_s(n, exact) + HOOKS_S["cpu"]
        found[n] = candidate(n, exact.nbytes, ratio, device_s, price).cost_s
    return found


def switches(chosen):
    return sum(a != b for a, b in itertools.pairwise(chosen))


# ------------------------------------------------------------------- drift


def test_choices_follow_a_drift_within_ten_steps():
    run, behind, chosen = Run(may_keep=True), 0, []
    for step in range(200):
        x = sparse(0.9 - 0.8 * step / 199, step, wide=True)
        chosen.append(run.step(x))
        now = costs(x, KEEP, "zvc", "csr", "rle", "zvc+expk", "expk")
        now = {n: c * (1 - MARGIN * (n == KEEP)) for n, c in now.items()}
        late = now[chosen[-1]] > (1 + HYSTERESIS + 0.02) * min(now.values())
        behind = behind + 1 if late else 0
        assert behind <= 10, f"step {step}: {chosen[-1]} of {now}"
    assert (chosen[0], chosen[-1]) == ("zvc", KEEP)
    assert switches(chosen) == 1


def test_a_sudden_change_is_seen_at_the_next_step():
    run = Run()
    for step in range(20):
        run.step(sparse(0.9, step))
    before = run.step(sparse(0.9, 20))
    chosen = [run.step(torch.randn(N)) for _ in range(3)]
    assert chosen[0] == before  # nothing has told it yet
    assert chosen[1] in ("expk", "zvc+expk")


@pytest.mark.parametrize(
    ("shares", "may_keep", "wide"),
    [
        ([0.45], False, False),
        ([0.65], True, True),
        *(
            pytest.param(np.linspace(0.05, 0.85, 5), *flags, marks=pytest.mark.slow)
            for flags in itertools.product([False, True], repeat=2)
        ),
    ],
)
def test_noise_does_not_make_choices_flap(shares, may_keep, wide):
    rng = np.random.default_rng(0)
    for zeros in shares:
        run = Run(may_keep=may_keep)
        chosen = [
            run.step(
                sparse(zeros * (1 + rng.uniform(-0.03, 0.03)), step, wide=wide),
                rng.uniform(0.97, 1.03),
            )
            for step in range(60)
        ]
        steady = chosen[8:]  # the first sample may have been an unusual one
        assert all(switches(steady[i : i + 50]) <= 1 for i in range(len(steady) - 50)), zeros


# -------------------------------------------------------------- corrections


def test_a_slow_neighbour_slows_all_codecs_and_changes_no_choice(monkeypatch):
    monkeypatch.setitem(PRICES_S_PER_BYTE, "cpu", 2.5e-9)  # worth it even at a third of the rate
    run = Run()
    chosen = [run.step(sparse(0.6, step), slower=3.0) for step in range(40)]
    assert switches(chosen) == 0
    found = run.advisor.explain()[0]
    assert found.candidates[0].device_s - HOOKS_S["cpu"] == pytest.approx(
        3.0 * rate_s(found.candidates[0].codec, profile(sparse(0.6, 39))), rel=0.05
    )


def test_one_slow_codec_is_left():
    factors = TimeCorrections()
    for _ in range(60):
        factors.observe("zvc", 1e-3, 8e-3)
        factors.observe("expk", 1e-3, 1e-3)
        factors.refit()
    assert factors.seconds("zvc", 1e-3) / factors.seconds("expk", 1e-3) == pytest.approx(8, rel=0.3)


def test_what_small_tensors_take_longer_is_no_factor_of_large_ones():
    factors = TimeCorrections()
    for _ in range(60):
        for predicted in (2e-5, 5e-5, 1e-3):
            factors.observe("bitpack", predicted, 8e-5 + 1.5 * predicted)
        factors.refit()
    assert factors.seconds("expk", 2e-3) == pytest.approx(8e-5 + 3e-3, rel=0.15)
    assert factors.seconds("expk", 2e-5) == pytest.approx(1.1e-4, rel=0.2)


def test_an_outlier_moves_little_and_a_change_is_followed():
    factors = TimeCorrections()

    def after(*measured):
        for seconds in measured:
            factors.observe("zvc", 1e-3, seconds)
            factors.refit()
        return factors.seconds("zvc", 1e-3)

    assert after(*10 * [1e-3]) == pytest.approx(1e-3, rel=0.01)
    assert after(0.1) == pytest.approx(1e-3, rel=0.01)
    assert after(*3 * [5e-3]) == pytest.approx(5e-3, rel=0.15)


def test_what_is_no_longer_measured_is_forgotten():
    factors = TimeCorrections()
    for _ in range(10):
        factors.observe("zvc", 1e-3, 20e-3)
    factors.refit()
    assert factors.seconds("zvc", 1e-3) > 1e-2
    for _ in range(600):
        factors.refit()
    assert factors.seconds("zvc", 1e-3) < 1.5e-3


@pytest.mark.parametrize("absurd", [0.0, -1.0, math.nan, math.inf, 1e9])
def test_absurd_times_are_ignored_with_one_notice(absurd, monkeypatch, caplog):
    monkeypatch.setattr(correction, "_warned", False)
    factors = TimeCorrections()
    with caplog.at_level(logging.WARNING, "cswap"):
        for _ in range(5):
            factors.observe("zvc", 1e-3, absurd)
            factors.refit()
    assert factors.seconds("zvc", 1e-3) == 1e-3
    assert len(caplog.records) == 1


def test_choices_do_not_depend_on_times_if_runs_must_be_equal():
    torch.use_deterministic_algorithms(True)
    try:
        run = Run()
        for step in range(10):
            run.step(sparse(0.6, step), slower=7.0)
        corrections = run.advisor._costs["cpu"].corrections
        assert corrections.seconds(run.settled, 1e-3) == 1e-3
    finally:
        torch.use_deterministic_algorithms(False)


# -------------------------------------------------------------------- price

OPTIONS = st.lists(
    st.lists(st.tuples(st.floats(0, 1), st.floats(1, 100)), min_size=1, max_size=4),
    min_size=1,
    max_size=6,
)


def total(options, price):
    return sum(min(row, key=lambda o: o[0] + price * o[1])[1] for row in options)


@given(OPTIONS, st.floats(1, 400))
def test_the_price_is_the_lowest_at_which_the_bytes_fit(options, limit):
    price = fit_price(options, limit, 10.0)
    assert 0 <= price <= 10.0
    if price < 10.0:
        assert total(options, price + 1e-9) <= limit
    if price > 1e-6:
        assert total(options, 0.999 * price - 1e-9) >= min(limit, total(options, price))


def test_a_link_with_time_to_spare_costs_nothing_and_a_full_one_its_time():
    options = [[(1.0, 10.0), (2.0, 5.0)]] * 4
    assert fit_price(options, 40.0, 1.0) == 0.0
    assert 0.19 < fit_price(options, 20.0, 1.0) < 0.21
    assert fit_price(options, 1.0, 1.0) == 1.0
    assert fit_price([], 1.0, 1.0) == 0.0


@given(OPTIONS, st.floats(0.1, 5), st.floats(0.1, 5), st.floats(0, 200), st.floats(0, 200))
def test_the_links_price_makes_device_time_and_exposed_transfers_least(
    options, out_s, in_s, forward_bytes, backward_bytes
):
    rates = (1 / out_s, 1 / in_s)
    hidden = (forward_bytes * out_s, backward_bytes * in_s)

    def cost(chosen):
        nbytes = sum(n for _, n in chosen)
        exposed = [max(nbytes / r - h, 0.0) for r, h in zip(rates, hidden, strict=True)]
        return sum(s for s, _ in chosen) + sum(exposed)

    price = link_price(options, rates, hidden)
    assert 0 <= price <= (out_s + in_s) * (1 + 1e-9)
    chosen = [min(row, key=lambda o: o[0] + price * o[1]) for row in options]
    best = min(map(cost, itertools.product(*options)))
    # Whole tensors: at a bend, at most one of them is not as it would be with halves.
    gap = max(max(s for s, _ in row) - min(s for s, _ in row) for row in options)
    spread = max(max(n for _, n in row) - min(n for _, n in row) for row in options)
    assert cost(chosen) <= best + gap + spread * (out_s + in_s) + 1e-6


@pytest.mark.parametrize("jump", [-1e6, 1e9, math.nan])
def test_a_clock_that_jumps_is_ignored(jump):
    clock = StepClock()
    now = 0.0
    for _ in range(6):
        clock.begin_step(now, 0.0)
        now += 0.1
    clock.begin_step(now + jump, 0.0)
    clock.begin_step(now + 0.1, 0.0)
    clock.begin_step(now + 0.2, 0.0)
    assert clock.step_s == pytest.approx(0.1)


def test_nothing_is_said_of_the_time_of_the_first_steps():
    """On the twin's H200, the first three of ResNet-50 took 12.8, 6.7 and 4.1 s: all went raw."""
    clock, now_s = StepClock(), 0.0
    for n, step_s in enumerate([12.8, 6.7, 4.1, 0.27, 0.27]):
        clock.begin_step(now_s, 0.0)
        now_s += step_s
        assert (clock.step_s is None) is (n < LEAST_STEPS)
    assert clock.step_s == pytest.approx(0.27)


def test_waiting_for_swaps_is_no_time_to_hide_transfers_in():
    clock = StepClock()
    for step in range(5):
        clock.begin_step(0.1 * step, 0.04 * step)
    assert clock.step_s == pytest.approx(0.06)


def test_waits_that_are_measured_now_and_then_count_in_all_steps():
    clock, exposed_s = StepClock(), 0.0
    for step in range(17):
        clock.begin_step(0.1 * step, exposed_s)
        exposed_s += 0.32 if step % 8 == 7 else 0.0
    assert clock.step_s == pytest.approx(0.06)


def test_slow_steps_of_the_beginning_do_not_outlive_their_waits():
    clock, now_s, exposed_s = StepClock(), 0.0, 0.0
    for step in range(16):
        clock.begin_step(now_s, exposed_s)
        now_s += 1.2 if step < 5 else 0.25
        exposed_s += 1.0 if step < 5 else 0.01
        assert clock.step_s is None or 0.15 < clock.step_s < 0.3
    assert clock.step_s is not None


@pytest.mark.parametrize("slow", [[1.65, 3.07, 1.03], [2.2, 4.1]])
def test_steps_in_which_memory_is_pinned_hide_no_transfers(slow):
    """Most of the first steps pin the host's memory; then all transfers seemed to be hidden."""
    clock, now_s = StepClock(), 0.0
    for step_s in [*slow, 0.165, 0.165]:
        clock.begin_step(now_s, 0.0)
        now_s += step_s
    clock.begin_step(now_s, 0.0)
    assert clock.step_s == pytest.approx(0.165)


@pytest.fixture
def linked(monkeypatch):
    """A CPU whose tensors leave over a link of 1 GB/s, with raw costing next to nothing."""
    free = CodecTraits(lambda _: 1.0, rates={"cpu": CodecRate(math.inf, math.inf, 0.0)})
    monkeypatch.setattr(get_codec("raw"), "traits", free)
    monkeypatch.setitem(PRICES_S_PER_BYTE, "cpu", 2e-9)
    monkeypatch.setitem(LINK_BYTES_PER_S, "cpu", (1e9, 1e9))
    now = [0.0]
    monkeypatch.setattr("cswap.advisor.advisor.time.perf_counter", lambda: now[0])

    def run(step_s, steps=24):
        here = Run()
        for step in range(steps):
            chosen = here.step(sparse(0.6, step))
            now[0] += step_s
        return chosen, here.advisor._costs["cpu"].price_s_per_byte

    return run


def test_while_transfers_hide_nothing_is_compressed(linked):
    assert linked(1.0) == ("raw", 0.0)


def test_on_a_full_link_everything_is(linked):
    chosen, price = linked(1e-6)
    assert chosen.startswith("zvc")
    assert price == 2e-9


def test_too_small_a_host_limit_raises_the_price():
    run = Run(host_limit=1000, codec="auto")
    for step in range(8):
        run.step(sparse(0.6, step))
    assert run.advisor._costs["cpu"].price_s_per_byte > DEFAULT_PRICE_S_PER_BYTE


# ----------------------------------------------------------------- policies


def test_policies_choose_as_they_say():
    x = sparse(0.6, 0)
    assert Run(policy="raw").step(x) == "raw"
    assert Run(policy="static:rle").step(x) == "rle"
    assert Run(policy="static:bitpack").step(x) == "raw"


@pytest.mark.parametrize("name", ["vdnn", "static", "static:nothing", "aut"])
def test_an_unknown_policy_is_refused(name):
    with pytest.raises(ConfigError, match=r"nothing|must be one of"):
        Advisor(SwapConfig(policy=name), None)


def test_regret_is_what_the_choice_cost_above_the_best_other():
    run = Run()
    for step in range(4):
        run.step(sparse(0.6, step))
    found = run.advisor.explain()[0]
    assert found.measured[0].codec == found.codec
    assert found.measured[0].count == 4
    assert found.measured_cost_s == pytest.approx(found.candidates[0].cost_s, rel=0.2)
    assert found.regret_s == 0.0
