"""The rate of a device's memory: `cswap.devices.memory_rate`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from cswap.devices import memory_rate as module
from cswap.devices import stopwatch
from cswap.devices.memory_rate import CPU_BYTES_PER_S, CUDA_BYTES_PER_S, memory_rate
from cswap.devices.stopwatch import CudaStopwatch
from cswap.engine.trials import _timed

CUDA = torch.device("cuda", 3)


@pytest.fixture
def measures(monkeypatch):
    """A device's answers, one after the other; and the indices that it was asked with."""
    answers: list[Any] = []
    asked: list[int] = []

    def measure(index):
        asked.append(index)
        answer = answers.pop(0)
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(module, "_measured", {})
    monkeypatch.setattr(module, "_measure", measure)
    monkeypatch.setattr(CudaStopwatch, "is_on", lambda _watch: True)
    return answers, asked


def test_a_cpu_has_a_rate_that_was_assumed():
    assert memory_rate(torch.device("cpu")) == CPU_BYTES_PER_S


def test_a_gpus_is_measured_once(measures):
    answers, asked = measures
    answers.append(3e12)
    assert memory_rate(CUDA) == memory_rate(CUDA) == 3e12
    assert asked == [3]


def test_without_memory_it_is_assumed_and_not_asked_for_again(measures):
    answers, asked = measures
    answers.append(torch.OutOfMemoryError())
    assert memory_rate(CUDA) == memory_rate(CUDA) == CUDA_BYTES_PER_S
    assert asked == [3]


def test_a_captured_graph_gets_no_copies(measures, monkeypatch):
    answers, asked = measures
    answers.append(3e12)
    with monkeypatch.context() as patch:
        patch.setattr(CudaStopwatch, "is_on", lambda _watch: False)
        assert memory_rate(CUDA) == CUDA_BYTES_PER_S
    assert not asked
    assert memory_rate(CUDA) == 3e12


def test_ranks_that_decide_alike_ask_nobody(measures):
    answers, asked = measures
    answers.append(3e12)
    assert memory_rate(CUDA) == 3e12
    assert memory_rate(CUDA, assumed=True) == CUDA_BYTES_PER_S
    assert asked == [3]


def test_a_chain_is_timed_while_the_host_is_ahead(monkeypatch):
    class Watch:
        """A host that takes 3 s to issue 1 s of work, and the work of the device."""

        host_s = device_s = 0.0

        def mark(self):
            return self.host_s, self.device_s

        def seconds(self, earlier, later):
            return later[1] - earlier[1]

        def host_seconds(self, earlier, later):
            return later[0] - earlier[0]

        def get_ahead(self, seconds):
            self.device_s += seconds

        def run(self, _inputs, _exact):
            self.host_s += 3.0
            self.device_s = max(self.device_s + 1.0, self.host_s)

    watch: Any = Watch()
    watch.formula = SimpleNamespace(layout=SimpleNamespace(device=CUDA))
    monkeypatch.setattr("cswap.engine.trials.stopwatch_of", lambda _: watch)
    assert _timed(watch, [], True) == 1.0


def test_to_mark_takes_time_that_is_not_the_programs():
    def mark(came_s, left_s):
        return stopwatch._Mark(None, came_s, left_s)

    assert CudaStopwatch.host_seconds(mark(1.0, 3.0), mark(7.0, 8.0)) == 4.0
    assert CudaStopwatch.host_seconds(mark(1.0, 3.0), mark(1.0, 3.0)) == -2.0  # the mark's own
    assert CudaStopwatch.seconds(mark(1.0, 3.0), mark(7.0, 8.0)) == 0.0  # it was off
