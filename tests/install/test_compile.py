"""torch.compile and cswap in one program: right gradients, whichever comes first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import cswap

pytestmark = pytest.mark.filterwarnings("ignore")


@pytest.mark.parametrize("where", ["everything", "the model", "the compiled model"])
def test_a_compiled_model_keeps_its_gradients(where):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))
    compiled = torch.compile(net, backend="aot_eager")
    x = torch.randn(128, 64)

    def gradients():
        net.zero_grad()
        compiled(x).square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    expected = gradients()
    targets: dict[str, Any] = {"everything": None, "the model": net, "the compiled model": compiled}
    target = targets[where]
    with cswap.install(target, min_bytes=0, codec="zvc") as handle:
        for _ in range(2):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))
    # hooks put on the inner model come too late for a region that was compiled before
    assert (handle.stats.packed > 0) is (where != "the model")
