"""Events, peaks and rates of a GPU, on stand-ins for the functions of torch that they ask."""

from __future__ import annotations

import types

import pytest
import torch

from cswap.advisor.calibration import Link
from cswap.devices import stopwatch
from cswap.fit import link_rates as module
from cswap.fit.link_rates import link_rates
from cswap.fit.resident import AllocatorMeter


class Event:
    """An event that fires when it is waited for; milliseconds count its records."""

    n_recorded = 0

    def __init__(self):
        self.at_ms, self.fired = 0.0, False

    def record(self, stream):
        Event.n_recorded += 1
        self.at_ms = 10.0 * Event.n_recorded + stream

    def synchronize(self):
        self.fired = True

    def elapsed_time(self, later):
        assert self.fired
        assert later.fired
        return later.at_ms - self.at_ms


@pytest.fixture
def streams(monkeypatch):
    """The number of the current stream, and whether a graph is captured."""
    now = types.SimpleNamespace(stream=0, captures=False)
    monkeypatch.setattr(stopwatch, "cuda_event", lambda *, timing: Event() if timing else None)
    stand_in = types.SimpleNamespace(
        current=lambda _index: now.stream, is_capturing=lambda: now.captures
    )
    monkeypatch.setattr(stopwatch, "cuda_streams", stand_in)
    return now


def test_a_stopwatch_of_a_gpu_waits_for_both_of_its_marks(streams):
    watch = stopwatch.CudaStopwatch(0)
    first, second = watch.mark(), watch.mark()
    assert watch.seconds(first, second) == pytest.approx(0.01)
    assert watch.host_seconds(first, second) >= 0
    assert watch.seconds(second, first) == 0.0  # of streams that ran in another order


def test_a_stopwatch_is_off_while_a_graph_is_captured(streams):
    watch = stopwatch.CudaStopwatch(0)
    before = watch.mark()
    streams.captures = True
    n = Event.n_recorded
    during = watch.mark()
    assert not watch.is_on()
    assert Event.n_recorded == n
    assert watch.seconds(before, during) == watch.seconds(during, before) == 0.0


def test_the_peak_of_a_step_is_that_of_all_its_laps(monkeypatch):
    peaks = iter([5, 9, 3, 2, 4])
    resets: list[object] = []
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _device: next(peaks))
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    meter = AllocatorMeter(torch.device("cuda", 0))
    assert [meter.lap(), meter.lap()] == [5, 9]
    assert meter.take(0) == 9
    assert meter.take(0) == 2
    assert meter.lap() == 4
    assert len(resets) == 5


@pytest.fixture
def device_of_measurement(monkeypatch):
    """The index of the device on which rates are measured, and no calibration."""
    link_rates.cache_clear()
    found = []

    class On:
        def __init__(self, index):
            found.append(index)

        __enter__ = __exit__ = lambda *_: None

    monkeypatch.setattr(torch.cuda, "device", On)
    monkeypatch.setattr(module, "stored", lambda _kind: None)
    yield found
    link_rates.cache_clear()


def test_rates_are_measured_once_for_a_device(monkeypatch, device_of_measurement):
    monkeypatch.setattr(module, "measure_rates", lambda: (3.0, 2.0, 1.0))
    assert link_rates(1) == link_rates(1) == (3.0, 2.0, 1.0)
    assert device_of_measurement == [1]


def test_a_calibration_is_taken_before(monkeypatch, device_of_measurement):
    known = Link(40.0, 20.0, 0.0, 0.5)
    monkeypatch.setattr(module, "stored", lambda _kind: types.SimpleNamespace(link=known))
    assert link_rates(0) == (40.0, 20.0, 10.0)
    assert not device_of_measurement


def test_a_link_that_cannot_be_measured_has_defaults(monkeypatch, caplog, device_of_measurement):
    def fails():
        raise RuntimeError("out of memory")

    monkeypatch.setattr(module, "measure_rates", fails)
    assert link_rates(0) == (25e9, 25e9, 25e9)
    assert "out of memory" in caplog.text
