"""torch.compile and cswap in one program: right gradients and swaps, whichever comes first."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from torch import nn
from torch._dynamo.eval_frame import OptimizedModule
from torch._dynamo.utils import counters

import cswap
from cswap import dynamo

pytestmark = pytest.mark.filterwarnings("ignore")

COMPILE: dict[str, Any] = {"backend": "aot_eager", "fullgraph": True}


class Block(nn.Module):
    """A model whose forward is not torch's own."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(64, 256), nn.Linear(256, 64)

    def forward(self, x):
        """Args: x: [128, 64]."""
        return x + self.narrow(nn.functional.gelu(self.wide(x)))


def sequential():
    """A model of torch's own modules."""
    return nn.Sequential(nn.Linear(64, 256), nn.GELU(), nn.Linear(256, 64))


def install(model):
    return cswap.install(model, min_bytes=0, codec="zvc")  # none is wanted early


def installed_first(net):
    return install(net), torch.compile(net, **COMPILE)


def installed_first_in_place(net):
    handle = install(net)
    net.compile(**COMPILE)
    return handle, net


def compiled_first(net):
    compiled = torch.compile(net, **COMPILE)
    return install(net), compiled


def compiled_first_in_place(net):
    net.compile(**COMPILE)
    return install(net), net


def on_the_compiled(net):
    compiled = torch.compile(net, **COMPILE)
    return install(compiled), compiled


def everywhere(net):
    return install(None), torch.compile(net, **COMPILE)


ORDERS = (
    *(installed_first, installed_first_in_place, compiled_first, compiled_first_in_place),
    *(on_the_compiled, everywhere),
)


@pytest.fixture(autouse=True)
def fresh_compiler():
    torch._dynamo.reset()
    counters.clear()
    dynamo._warn.cache_clear()
    yield
    torch._dynamo.reset()


def gradients(net, call, x):
    net.zero_grad()
    call(x).square().sum().backward()
    return [p.grad.clone() for p in net.parameters()]


@pytest.mark.sampled
@pytest.mark.parametrize("make", [Block, sequential])
@pytest.mark.parametrize("order", ORDERS)
def test_a_compiled_model_swaps_in_one_graph_and_keeps_its_gradients(make, order, caplog):
    torch.manual_seed(0)
    net, x = make(), torch.randn(128, 64)
    expected = gradients(net, net, x)
    handle, call = order(net)
    with handle, caplog.at_level(logging.WARNING, "cswap"):
        for _ in range(3):
            assert all(map(torch.equal, gradients(net, call, x), expected))
    assert (counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())) == (1, 0)
    # torch traces the call of its own modules from the outside: nothing can be between. From 2.14
    # on, this holds for net.compile(), too.
    late = [compiled_first]
    if hasattr(OptimizedModule, "_should_wrap_module_call_impl"):
        late.append(compiled_first_in_place)
    too_late = make is sequential and order in late
    assert (handle.stats.swapped > 0) is not too_late
    assert ("cswap.install(torch.compile(model))" in caplog.text) is too_late


def test_a_model_inside_of_a_larger_graph_stays_and_says_so_once(caplog):
    net, x = Block(), torch.randn(128, 64)
    expected = gradients(net, net, x)
    with install(net) as handle, caplog.at_level(logging.WARNING, "cswap"):
        step = torch.compile(lambda x: net(x) * 1, **COMPILE)
        for rows in (x, x, torch.cat([x, x])):
            assert len(gradients(net, step, rows)) == len(expected)
        assert all(map(torch.equal, gradients(net, step, x), expected))
    assert handle.stats.packed == 0
    assert caplog.text.count("tensors that it saves stay") == 1


def test_the_compiler_looks_again_after_a_forward_that_raises():
    class Fails(Block):
        """A model whose forward raises where it is told to."""

        fails = False

        def forward(self, x):
            """Args: x: [128, 64]."""
            if self.fails:
                raise ValueError("second")
            return super().forward(x)

    net, x = Fails(), torch.randn(128, 64)
    with install(net) as handle:
        call = torch.compile(net, backend="aot_eager")
        call(x)
        net.fails = True
        with pytest.raises(ValueError, match="second"):
            call(x)
        net.fails = False
        torch._dynamo.reset()
        counters.clear()
        call(x).sum().backward()
    assert counters["stats"]["unique_graphs"] >= 1
    assert handle.stats.swapped > 0


def in_one_graph(net):
    net[1] = torch.compile(net[1], **COMPILE)


def test_a_goal_of_a_model_with_a_part_that_is_one_graph():
    torch._dynamo.reset()
    net, x = nn.Sequential(sequential(), sequential()), torch.randn(512, 64)
    parameters = list(net.parameters())
    wanted = torch.autograd.grad(net(x).square().mean(), parameters)
    in_one_graph(net)
    with cswap.install(net, fit="4MiB") as handle:
        for _ in range(8):
            found = torch.autograd.grad(net(x).square().mean(), parameters)
            assert all(map(torch.equal, found, wanted))
        assert handle.goal is not None
        assert handle.goal.phase in ("planning", "obeying")
