"""Which tensors stay, so that a step's peak is as low as the time allows: against all choices."""

import itertools
import math
import random

import pytest

from cswap.advisor.step_peak import Leaver, StepPeak

MIB = 1 << 20


def peak_of(held, leavers, staying):
    """Largest sum of the step, added up moment by moment."""
    peak = 0.0
    for moment in range(len(held)):
        here = held[moment]
        for n, leaver in enumerate(leavers):
            if n in staying and leaver.moment <= moment:
                here += leaver.gain
            if leaver.returns == moment:
                many = sum(other.returns == moment for other in leavers) > 1
                here += leaver.nbytes * many  # its gradient
                here += leaver.nbytes * (n not in staying)  # decoded beside its encoding
        peak = max(peak, here)
    return peak


def seconds_of(leavers, staying):
    return sum(leaver.seconds for n, leaver in enumerate(leavers) if n not in staying)


def random_step(rng, *, nodes):
    held, leavers, now = [], [], 0.0
    ends = sorted(rng.sample(range(8), rng.randint(0, 7))) if nodes else range(8)
    count = rng.randint(1, 8)
    for index in range(count):
        nbytes = rng.choice([1, 2, 4, 8, 16]) * rng.choice([1, 1, 10])
        gain = nbytes * rng.choice([0.0, 0.2, 0.5, 0.75, 1.0])
        if gain:
            returns = min((end for end in ends if end >= index), default=count - 1)
            leavers.append(Leaver(index, nbytes, gain, rng.random(), min(returns, count - 1)))
        now += nbytes - gain
        held.append(now)
    return held, leavers


@pytest.mark.sampled
@pytest.mark.parametrize("nodes", [False, True])
@pytest.mark.parametrize("limited", [False, True])
def test_close_to_the_best_of_all_choices(limited, nodes):
    rng, worse = random.Random(7), []
    for _ in range(400):
        held, leavers = random_step(rng, nodes=nodes)
        limit_s = rng.random() * seconds_of(leavers, ()) if limited else math.inf
        choice = StepPeak(held, leavers).within(limit_s)
        assert seconds_of(leavers, choice.staying) <= limit_s
        peak = peak_of(held, leavers, choice.staying)
        assert peak <= choice.peak_bytes * (1 + 1e-9)
        numbers = range(len(leavers))
        choices = [
            set(c) for k in range(len(leavers) + 1) for c in itertools.combinations(numbers, k)
        ]
        best = min(peak_of(held, leavers, c) for c in choices if seconds_of(leavers, c) <= limit_s)
        worse.append(peak / best)
    assert sum(quotient > 1.05 for quotient in worse) <= 8
    assert max(worse) < 1.3


def alike(count, seconds=1.0, nbytes=8 * MIB, gain=4 * MIB):
    held = [(n + 1) * (nbytes - gain) for n in range(count)]
    return held, [Leaver(n, nbytes, gain, seconds, n) for n in range(count)]


def test_the_last_one_stays():
    held, leavers = alike(6)
    choice = StepPeak(held, leavers).within(math.inf)
    assert choice.staying == {5}
    assert choice.peak_bytes == 5 * 4 * MIB + 8 * MIB
    assert not choice.limited


def test_late_small_ones_stay_where_the_first_layers_are_the_largest():
    held, leavers, now = [], [], 0
    for n, nbytes in enumerate([64, 64, *30 * [4]]):
        now += nbytes // 4
        held.append(now)
        leavers.append(Leaver(n, nbytes, 3 * nbytes // 4, 1.0, n))
    choice = StepPeak(held, leavers).within(math.inf)
    assert choice.peak_bytes == peak_of(held, leavers, ()) == 16 + 16 + 64
    assert choice.staying == set(range(32 - len(choice.staying), 32))
    assert len(choice.staying) == (96 - now) // 3


def test_tensors_that_take_long_for_a_byte_stay_first():
    held, leavers = alike(6)
    leavers[1] = leavers[1]._replace(seconds=50.0)
    choice = StepPeak(held, leavers).within(5.0)
    assert choice.limited
    assert 1 in choice.staying
    assert 0 not in choice.staying


def test_nothing_leaves_without_time():
    held, leavers = alike(6)
    assert StepPeak(held, leavers).within(0.0).staying == set(range(6))


def test_tensors_that_always_stay_count():
    # One of 100 that nobody can swap, saved after the first: its moment is the peak anyway.
    leavers = [Leaver(0, 8, 6, 1.0, 0), Leaver(2, 8, 6, 1.0, 2)]
    choice = StepPeak([2, 102, 104], leavers).within(math.inf)
    assert choice.staying == {1}
    assert choice.peak_bytes == 102 + 8


def test_all_tensors_of_a_single_node_stay():
    held, leavers = alike(6)
    leavers = [leaver._replace(returns=5) for leaver in leavers]
    choice = StepPeak(held, leavers).within(math.inf)
    assert choice.staying == set(range(6))
    assert choice.peak_bytes == 2 * 6 * 8 * MIB  # with their gradients
    assert not choice.limited


def test_a_node_with_many_tensors_holds_their_gradients():
    # Those of the node: 8 of 8 bytes, encoded in 4. Then one of 100 that cannot leave.
    held = [4 * (n + 1) for n in range(8)]
    alone = [Leaver(n, 8, 4, 1.0, n) for n in range(8)]
    assert StepPeak([*held, held[-1] + 100], alone).within(math.inf).peak_bytes == 132
    together = [leaver._replace(returns=7) for leaver in alone]
    choice = StepPeak([*held, held[-1] + 100], together).within(math.inf)
    assert len(choice.needless) in (3, 4)  # 32 + 64 + 64 in the node's sum: 160, 4 less for each
    assert choice.peak_bytes == 148
