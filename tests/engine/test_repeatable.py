"""Lossy training repeats: the same seed, the same gradients, whatever runs when over a link."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import cswap
from cswap.advisor.rates import PRICES_S_PER_BYTE
from cswap.hooks import Swapping
from tests.engine.engines import engine_over_a_link

OPTIONS = {
    "int8": {"codec": "int8"},
    "int4, stochastic": {"codec": "int4"},
    "chosen": {"lossy": 0.1},
    "no room": {"codec": "int8", "host_limit": "200KiB"},
}


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


def training(order, options):
    """Gradients of all steps. Args: order: a seed."""
    torch.manual_seed(0)
    net = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(64, 64), nn.GELU())))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    x, found = torch.randn(256, 64), []
    with Swapping(engine_over_a_link(order, min_bytes=0, guard_every=0, **options)) as engine:
        engine.plan_copies(1 << 30)  # tensors stay until they have been read, at a moment of chance
        for _ in range(12):  # samples are taken anew every 8 steps
            engine.begin_step()
            optimizer.zero_grad()
            net(x).square().mean().backward()
            found += [p.grad.clone() for p in net.parameters() if p.grad is not None]
            optimizer.step()
    return found, engine.stats


@pytest.mark.usefixtures("deterministic")
@pytest.mark.parametrize(
    "options",
    [
        pytest.param(o, id=n, marks=() if n in ("int8", "chosen") else pytest.mark.slow)
        for n, o in OPTIONS.items()
    ],
)
def test_under_deterministic_algorithms_values_depend_on_the_steps_alone(options, monkeypatch):
    monkeypatch.setitem(PRICES_S_PER_BYTE, "cpu", 1e-7)  # small tensors are worth their hooks
    runs = [training(order, options) for order in range(3)]
    for gradients, _ in runs[1:]:
        assert all(map(torch.equal, gradients, runs[0][0]))
    assert all(stats.fallbacks_by_reason.keys() <= {"host_limit"} for _, stats in runs)
    exact, _ = training(0, {"codec": "zvc"})
    assert not all(map(torch.equal, exact, runs[0][0]))
    torch.use_deterministic_algorithms(False)  # by the fixture it was on
    by_chance = {training(o, options)[1].kept_by_reason.get("wanted_early", 0) for o in range(6)}
    assert len(by_chance) > 1  # of tensors that were still there, some had their own values


@pytest.mark.usefixtures("deterministic")
def test_a_tensor_that_stays_has_the_values_of_its_codec():
    x = torch.randn(64, 64, requires_grad=True)

    def gradient(**options):
        with cswap.swapping(codec="int8", min_bytes=0, **options) as engine:
            y = (x.t() * 2).sin().sum()  # strided, too
        return torch.autograd.grad(y, x)[0], engine.stats

    swapped, stats = gradient()
    assert stats.swapped == 1
    kept, stats = gradient(host_limit=4096)
    assert stats.swapped == 0
    assert stats.kept_by_reason == {"host_limit": 1}
    assert torch.equal(kept, swapped)
    exact = torch.autograd.grad((x.t() * 2).sin().sum(), x)[0]
    assert not torch.equal(kept, exact)
