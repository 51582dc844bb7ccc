"""The rate of a device's memory: `cswap.devices.memory_rate`."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from cswap.devices import memory_rate as module
from cswap.devices.memory_rate import CPU_BYTES_PER_S, CUDA_BYTES_PER_S, memory_rate

CUDA = torch.device("cuda", 3)


@pytest.fixture
def measures(monkeypatch):
    """What a device says, one after the other; and of which device it was asked."""
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
    return answers, asked


def test_a_cpu_has_a_rate_that_was_assumed():
    assert memory_rate(torch.device("cpu")) == CPU_BYTES_PER_S


def test_a_gpus_is_measured_once(measures):
    answers, asked = measures
    answers.append(3e12)
    assert memory_rate(CUDA) == memory_rate(CUDA) == 3e12
    assert asked == [3]


@pytest.mark.parametrize("answer", [torch.OutOfMemoryError(), 0.0])
def test_without_memory_it_is_assumed_and_asked_for_again(measures, answer):
    answers, asked = measures
    answers += [answer, 2e12]
    assert memory_rate(CUDA) == CUDA_BYTES_PER_S
    assert memory_rate(CUDA) == 2e12
    assert asked == [3, 3]
