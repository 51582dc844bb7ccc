"""`stats` know the last step: its peak, its bytes without cswap, and the tensors that stayed.

See Note [with cswap and without] in cswap/stats/steps.py.
"""

from __future__ import annotations

import pytest
import torch
from torch.autograd.graph import saved_tensors_hooks

import cswap
from cswap.stats.counters import SAVED, Counters
from cswap.stats.stats import Stats
from cswap.stats.steps import RECENT
from cswap.units import show_bytes

MIB = 1 << 20


def step_of(counters):
    found = counters.snapshot()
    return found.steps, found.step_peak_bytes, found.step_plain_bytes


def forward(counters, nbytes):
    """As one that saves a tensor which stays."""
    counters.begin_step()
    counters.admit(nbytes)
    counters.stay("does_not_pay", nbytes)


def backward(counters, nbytes):
    counters.begin_backward()
    counters.hold(device=-nbytes)


def a_step(counters):
    """One with every kind of count."""
    forward(counters, 100)
    counters.parameters.append(1000)
    counters.keep("parameter", 2000)
    counters.moves.append((50, 0, *SAVED))
    counters.moves.append((-50, 10, 0, "zvc", 50, 9, 0.0))
    counters.small.append(3)
    counters.keep("excluded", 4)
    counters.stayed.append(("does_not_pay", 20))
    counters.stayed.append(("parameter", 5))  # a cast of one
    counters.moves.append((0, 0, 1, "remat", 30, 0, 0.0))
    backward(counters, 100)
    counters.hold(host=-10)


@pytest.mark.parametrize("host_is_device", [True, False])
def test_a_step_is_held_against_what_it_holds_without_cswap(host_is_device):
    counters = Counters()
    counters.host_is_device = host_is_device
    for n in (1, 2, 3):
        a_step(counters)
        found = counters.snapshot()
        stay = 3 + 4 + 20 + 5
        assert found.steps == n
        assert found.step_plain_bytes == 100 + 50 + 30 + stay
        assert found.step_peak_bytes == 150 + stay
        assert found.step_gained_bytes == (50 - 9 + 30 if host_is_device else 80)
        assert found.step_encoded_bytes == 9
        assert found.step_kept_bytes_by_reason == {
            "does_not_pay": 120,
            "small": 3,
            "excluded": 4,
            "parameter": 5,
        }
        assert found.step_kept_by_reason == dict.fromkeys(found.step_kept_bytes_by_reason, 1) | {
            "does_not_pay": 2
        }
        assert found.kept_bytes_by_reason["parameter"] == n * 3005


def test_encodings_are_on_a_cpu_and_not_on_a_gpu():
    for host_is_device, peak in ((True, 60), (False, 40)):
        counters = Counters()
        counters.host_is_device = host_is_device
        counters.begin_step()
        counters.hold(device=40)
        counters.hold(device=-10, host=30)
        counters.begin_backward()
        assert counters.snapshot().step_peak_bytes == peak


def test_a_step_has_several_forwards_or_several_backwards():
    counters = Counters()
    forward(counters, 10)
    assert step_of(counters) == (0, 0, 0)
    forward(counters, 20)
    backward(counters, 10)
    assert step_of(counters) == (1, 30, 30)
    backward(counters, 20)
    assert step_of(counters) == (1, 30, 30)
    forward(counters, 7)
    assert step_of(counters) == (1, 30, 30)  # the last one with a backward
    backward(counters, 7)
    assert step_of(counters) == (2, 7, 7)


def test_a_forward_without_a_backward_is_no_step():
    counters = Counters()
    forward(counters, 1000)
    counters.hold(device=-1000)
    forward(counters, 10)
    backward(counters, 10)
    assert step_of(counters) == (1, 10, 10)


def test_what_autograd_uses_is_in_no_steps_peak():
    counters = Counters()
    counters.begin_step()
    counters.use(500)
    counters.admit(10)
    counters.use(-200)
    counters.hold(device=-10)
    counters.begin_backward()
    counters.use(600)
    counters.recount(device=0, host=0)  # after an interrupt
    assert counters.device_bytes == 900
    counters.use(-900)
    found = counters.snapshot()
    assert (found.step_peak_bytes, found.peak_saved_bytes, found.device_bytes) == (10, 900, 0)


def test_a_tensor_that_stays_by_a_plan_counts_once():
    counters = Counters()
    for looks in (True, False, False):
        counters.begin_step()
        counters.by_goal.extend([60, 60, 40])
        if looks:
            counters.by_goal_once.extend([60, 40])
        counters.begin_backward()
        assert step_of(counters)[1:] == (100, 100)
    assert counters.snapshot().kept_bytes_by_reason == {"goal": 480}


def test_a_tensor_that_was_counted_as_gone_counts_once():
    counters = Counters()
    counters.begin_step()
    counters.moves.append((50, 50, 1, "raw", 50, 50, 0.0))
    counters.begin_backward()
    counters.stay_early("wanted_early", 50)
    found = counters.snapshot()
    assert (found.step_peak_bytes, found.step_plain_bytes) == (50, 50)
    assert found.step_kept_bytes_by_reason == found.kept_bytes_by_reason == {"wanted_early": 50}


def test_first_steps_leave_the_recent_peak():
    counters = Counters()
    for n in range(RECENT + 1):
        nbytes = 1000 if n == 0 else 10 + n
        forward(counters, nbytes)
        backward(counters, nbytes)
        for _ in range(2):
            assert counters.snapshot().recent_peak_bytes == (1000 if n < RECENT else 10 + n)
            counters.begin_step()
    assert counters.snapshot().peak_saved_bytes == 1000


HELD = "held {} MiB of saved tensors at its peak, {} MiB without cswap: {}"


@pytest.mark.parametrize(
    ("peak", "plain", "says"),
    [
        (85 * MIB, 123 * MIB, HELD.format("85.0", "123.0", "31 % less")),
        (3 * MIB, 2 * MIB, HELD.format("3.0", "2.0", "50 % more")),
        (2 * MIB + 1, 2 * MIB, HELD.format("2.0", "2.0", "0 % less")),
        (0, 0, "saved nothing but parameters"),
    ],
)
def test_the_gain_is_one_line(peak, plain, says):
    stats = Stats(packed=1, steps=1, step_peak_bytes=peak, step_plain_bytes=plain)
    assert stats.gain() == f"the last step {says}"
    assert Stats(packed=1).gain() == "no step yet"


class Bytes:
    """Bytes of the storages that autograd saves, each once."""

    def __init__(self, model):
        self._known = {p.untyped_storage().data_ptr() for p in model.parameters()}
        self.nbytes = 0

    def pack(self, tensor):
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in self._known:
            self._known.add(storage.data_ptr())
            self.nbytes += storage.nbytes()
        return tensor


@pytest.fixture
def model():
    torch.manual_seed(0)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(128, 128), torch.nn.ReLU())]
    return torch.nn.Sequential(*layers, torch.nn.Linear(128, 8))


def plain_bytes(model, x):
    meter = Bytes(model)
    with saved_tensors_hooks(meter.pack, lambda packed: packed):
        model(x).sum().backward()
    return meter.nbytes


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"fit": "64GiB"},  # all stays, and ReLUs' results are saved twice
        {"codec": "zvc"},
        {"codec": "raw", "remat": False},
    ],
)
def test_bytes_without_cswap_are_those_of_a_step_without_cswap(model, options):
    x = torch.randn(512, 128)
    expected, looks = plain_bytes(model, x), set()
    options = {"min_bytes": 0} | options
    with cswap.install(model, **options) as handle:
        for _ in range(16):
            model(x).sum().backward()
            looks.add(handle.engine._state.chooser is None)
            stats = handle.stats
            assert stats.step_plain_bytes == expected
            assert stats.step_peak_bytes <= stats.step_plain_bytes + x.nbytes
            line = str(handle).split("\n")[0]
            assert line == f"cswap: {stats.gain()}"
    assert 4 < stats.steps <= 16  # modules in which all stays run without hooks
    if options.get("fit"):
        assert looks == {True, False}
        assert stats.step_kept_bytes_by_reason["goal"] > expected / 2


def test_a_forward_without_gradients_is_of_no_step(model):
    x = torch.randn(512, 128)
    expected = plain_bytes(model, x)
    with cswap.install(model, min_bytes="1GiB") as handle:  # so nothing is held
        loss = model(x).sum()
        with torch.no_grad():
            model(x)
        loss.backward()
    assert handle.stats.step_plain_bytes > expected  # results of ReLU are saved twice


def test_notes_of_a_recurrent_net_are_of_one_step():
    torch.manual_seed(0)
    cell, x = torch.nn.LSTMCell(32, 64), torch.randn(20, 16, 32)

    class Net(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.cell = cell

        def forward(self, x):
            state = (torch.zeros(16, 64), torch.zeros(16, 64))
            for one in x:
                state = self.cell(one, state)
            return state[0]

    model = Net()
    with cswap.install(model) as handle:
        for _ in range(5):
            model(x).sum().backward()
    stats = handle.stats
    said = stats.notes()
    assert "parameter" not in "\n".join(said)
    assert "lower min_bytes" not in "\n".join(said)
    assert stats.step_kept_bytes_by_reason["small"] * 3 < stats.kept_bytes_by_reason["small"]
    assert f"of {show_bytes(stats.step_plain_bytes)} (" in said[0]
