"""Measurements draw no random numbers from torch's generator: a training beside them uses it."""

from __future__ import annotations

import pytest
import torch

from cswap.advisor.calibrate import measure
from cswap.plan import this_machine


@pytest.mark.parametrize(
    "work",
    [
        lambda: this_machine._flops("cpu", torch.float32),
        lambda: measure("zvc", "cpu"),
    ],
    ids=["products", "calibration"],
)
def test_a_measurement_leaves_the_generator_alone(work):
    before = torch.get_rng_state()
    work()
    assert torch.equal(torch.get_rng_state(), before)
