"""Function transforms, forward-mode AD and tracing: tensors that stand for others stay."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from torch.autograd import forward_ad
from torch.func import functional_call, stack_module_state

import cswap

ALL: dict[str, Any] = {"min_bytes": 0, "codec": "zvc"}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(16, 16), nn.GELU(), nn.BatchNorm1d(16, affine=False))


@pytest.fixture
def x():
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(0))


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_forward_mode_ad(x):
    """It saves tensors of zeros that have no memory."""
    model = net()[:2]
    tangent = torch.ones_like(x)
    expected = torch.func.jvp(model, (x,), (tangent,))
    jacobian = torch.func.jacfwd(model)(x)
    with cswap.swapping(**ALL) as engine:
        found = torch.func.jvp(model, (x,), (tangent,))
        assert all(map(torch.equal, found, expected))
        assert torch.equal(torch.func.jacfwd(model)(x), jacobian)
        with forward_ad.dual_level():
            out = model(forward_ad.make_dual(x, tangent))
            assert torch.equal(forward_ad.unpack_dual(out).tangent, expected[1])
    assert engine.stats.packed > 0


def test_an_ensemble_by_vmap_over_an_installed_model(x):
    models = [net().eval() for _ in range(3)]
    parameters, buffers = stack_module_state(models)
    base = copy.deepcopy(models[0])

    def gradients():
        def one(p, b):
            return functional_call(base, (p, b), (x,))

        out = torch.vmap(one)(parameters, buffers)
        return torch.autograd.grad(out.square().sum(), list(parameters.values()))

    expected = gradients()
    with cswap.install(base, **ALL) as handle:
        found = gradients()
    assert all(map(torch.equal, found, expected))
    assert handle.stats.packed > 0


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_holds_nothing_of_cswap(x):
    model = net().eval()
    expected = torch.jit.trace(model, x)
    with cswap.swapping(**ALL) as engine:
        traced = torch.jit.trace(model, x)
    assert kinds(traced) == kinds(expected)
    assert engine.stats.packed > 0  # the check runs the model without tracing, too
    with cswap.install(model, **ALL):
        traced = torch.jit.trace(model, x)
    assert kinds(traced) == kinds(expected)


def kinds(traced):
    """Of the operators in a traced module."""
    return [node.kind() for node in traced.inlined_graph.nodes()]


def test_memory_that_is_not_there_is_not_looked_at():
    zeros = torch._efficientzerotensor((64, 64))
    with cswap.swapping(**ALL) as engine:
        y = (torch.ones(64, 64, requires_grad=True) * zeros).sum()
    assert engine.stats.kept_by_reason == {"storage": 1}
    y.backward()
