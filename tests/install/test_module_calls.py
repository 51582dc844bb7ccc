"""Modules are followed around their ``_call_impl``, whatever others put on them."""

from __future__ import annotations

import copy
import gc
import weakref

import pytest
import torch
from torch import nn

import cswap
from cswap.engine.saved.module_stack import OUTSIDE


def make_net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Sigmoid())


@pytest.fixture
def install():
    handles = []

    def make(model, **options):
        handles.append(cswap.install(model, min_bytes=1, codec="raw", **options))
        return handles[-1]

    yield make
    for handle in handles:
        handle.remove()


def attributes(net):
    return [(set(m.__dict__), len(m._forward_hooks)) for m in net.modules()]


def test_remove_leaves_modules_as_they_were(install):
    net = make_net()
    before = attributes(net)
    handle = install(net)
    assert attributes(net) != before
    assert not any(m._forward_hooks or m._forward_pre_hooks for m in net)
    handle.remove()
    assert attributes(net) == before


def test_tensors_that_a_hook_saves_belong_to_its_module(install):
    net = make_net()
    net[0].register_forward_pre_hook(lambda _module, args: args[0].sin())
    net[0].register_forward_hook(lambda _module, _args, out: out.exp())
    handle = install(net, exclude="0")
    net(torch.randn(8, 64, requires_grad=True)).sum().backward()
    # The argument of sin, the product's input, and the result of exp.
    assert handle.stats.kept_by_reason["excluded"] == 3


@pytest.mark.parametrize("when", ["before", "after"])
def test_a_forward_that_others_put_there_is_followed(install, when):
    net = make_net()
    plain = net[0].forward

    def other(x):
        return plain(x).sin()

    if when == "before":
        net[0].forward = other
    handle = install(net, exclude="0")
    if when == "after":
        net[0].forward = other
    x = torch.randn(8, 64)
    net(x).sum().backward()
    assert handle.stats.kept_by_reason["excluded"] == 2
    handle.remove()
    assert torch.equal(net[0](x), plain(x).sin())


def test_a_module_that_was_compiled_is_followed(install):
    torch._dynamo.reset()
    net = make_net()
    net[0].compile(backend="eager")
    plain = copy.deepcopy(net)
    compiled = net[0]._compiled_call_impl
    handle = install(net, exclude="0")
    x = torch.randn(8, 64)
    net(x).sum().backward()
    plain(x).sum().backward()
    assert handle.stats.kept_by_reason["excluded"] == 1
    assert all(map(torch.equal, gradients(net), gradients(plain)))
    handle.remove()
    assert net[0]._compiled_call_impl is compiled


def gradients(net):
    return [p.grad for p in net.parameters()]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_leaves_nothing_on_the_stack(install, error):
    def fails(*_):
        raise error

    net = make_net()
    handle = install(net)
    inside = []
    net[2].register_forward_pre_hook(lambda *_: inside.append(list(handle.engine.scopes.stack)))
    failing = net[1].register_forward_pre_hook(fails)
    with pytest.raises(error):
        net(torch.randn(8, 64))
    assert handle.engine.scopes.stack == [OUTSIDE]
    failing.remove()
    net(torch.randn(8, 64))
    assert [scope.path for scope in inside[0]] == ["", "", "2"]


def test_a_caught_error_leaves_nothing_on_the_stack(install):
    class Catches(nn.Module):
        def __init__(self):
            super().__init__()
            self.net = make_net()

        def forward(self, x):
            try:
                self.net(x[:, :3])
            except RuntimeError:
                return self.net(x)

    model = Catches()
    handle = install(model, exclude="net.0")
    model(torch.randn(8, 64)).sum().backward()
    assert handle.stats.kept_by_reason["excluded"] == 2  # autograd saves before an operator fails
    assert handle.stats.swapped


def test_a_replica_runs_its_own_parameters(install):
    net = make_net()
    install(net)
    replica = net[0]._replicate_for_data_parallel()
    replica._parameters = {name: torch.zeros_like(p) for name, p in net[0].named_parameters()}
    x = torch.randn(8, 64)
    assert not replica(x).any()
    assert net[0](x).any()


def test_two_models_that_share_a_module(install):
    shared = nn.Linear(64, 64)
    one, other = nn.Sequential(shared, nn.Tanh()), nn.Sequential(nn.Tanh(), shared)
    first, second = install(one), install(other, exclude="1")
    x = torch.randn(8, 64)
    one(x).sum().backward()
    other(x).sum().backward()
    assert "excluded" not in first.stats.kept_by_reason
    assert second.stats.kept_by_reason["excluded"] == 1
    first.remove()
    other(x).sum().backward()
    assert second.stats.kept_by_reason["excluded"] == 2
    second.remove()
    assert "_call_impl" not in shared.__dict__


def test_a_module_of_two_models_is_followed_by_both(install):
    inner = nn.Sequential(nn.Linear(64, 64), nn.Tanh())
    outer = nn.Sequential(inner, nn.Tanh())
    first, second = install(outer, exclude="0.0"), install(inner, exclude="0")
    before = [(h.stats.kept_by_reason.get("excluded", 0)) for h in (first, second)]
    assert before == [0, 0]
    outer(torch.randn(8, 64)).sum().backward()
    assert second.stats.kept_by_reason["excluded"] == 1
    second.remove()
    outer(torch.randn(8, 64)).sum().backward()
    assert first.stats.kept_by_reason["excluded"] == 1
    first.remove()
    assert "_call_impl" not in inner[0].__dict__


def test_a_model_that_nobody_needs_goes():
    net = make_net()
    references = [weakref.ref(module) for module in net.modules()]
    handle = cswap.install(net, min_bytes=1, codec="raw")
    net(torch.randn(8, 64)).sum().backward()
    del net, handle
    gc.collect()
    assert not any(reference() for reference in references)
