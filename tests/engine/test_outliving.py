"""Tensors that the program holds itself while backward runs: an encoding would come on top."""

import pytest
import torch
from torch import nn

import cswap

KIB = 1 << 10

pytestmark = pytest.mark.usefixtures("by_price")


def batch():
    """Nine of ten values are zero: a codec is worth its time."""
    x = torch.randn(1024, 64, generator=torch.Generator().manual_seed(0))
    return torch.relu(x - 1.3)


def model():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(64, 64), nn.Sigmoid(), nn.Linear(64, 64))


@pytest.fixture
def run(by_price):
    """Runs steps; returns how many tensors had stayed for that, before each, and the gradients."""

    def steps(n, *, holds, **options):
        net, kept = model(), []
        options = {"min_bytes": 0, "remat": False} | options
        with cswap.install(net, **options) as handle:
            for step in range(n):
                x = batch()
                loss = net(x).square().mean()
                kept.append(handle.stats.kept_by_reason.get("outlives", 0))
                if not holds(step, x):
                    del x
                loss.backward()
        return kept, [p.grad for p in net.parameters()]

    return steps


def always(*_):
    return True


def never(*_):
    return False


def test_a_batch_that_the_program_holds_stays_from_the_second_step_on(run):
    kept, gradients = run(5, holds=always)
    assert kept == [0, 1, 2, 3, 4]
    none, same = run(5, holds=never)
    assert none == 5 * [0]
    assert all(map(torch.equal, gradients, same))


def test_a_batch_that_the_program_gives_away_leaves_again(run):
    kept, _ = run(6, holds=lambda step, _x: step < 2)
    assert kept == [0, 1, 2, 2, 2, 2]


def test_an_output_that_the_program_holds_stays():
    torch.manual_seed(0)
    linear, kept = nn.Linear(64, 64), []
    nn.init.constant_(linear.bias, -1.0)  # or half of the output is zero, which is not enough
    net = nn.Sequential(linear, nn.ReLU())
    with cswap.install(net, min_bytes=0, remat=False) as handle:
        for _ in range(4):
            x = torch.randn(1024, 64)
            out = net(x)
            del x
            kept.append(handle.stats.kept_by_reason.get("outlives", 0))
            out.square().mean().backward()
    assert kept == [0, 1, 2, 3]


def test_a_look_at_a_node_in_forward_says_nothing(by_price):
    torch.manual_seed(0)
    linear, kept = nn.Linear(64, 64), []
    nn.init.constant_(linear.bias, -1.0)
    net = nn.Sequential(linear, nn.ReLU())
    with cswap.install(net, min_bytes=0, remat=False) as handle:
        for _ in range(4):
            x = torch.randn(1024, 64)
            out = net(x)
            assert torch.equal(out.grad_fn._saved_result, out)
            loss = out.square().mean()
            del x, out
            kept.append(handle.stats.kept_by_reason.get("outlives", 0))
            loss.backward()
    assert kept == 4 * [0]


def test_explanations_name_them(by_price):
    net, x = model(), batch()
    with cswap.install(net, min_bytes=0, remat=False) as handle:
        for _ in range(3):
            net(x).square().mean().backward()
        first = handle.engine.explain()[0]
    assert (first.position, first.codec, first.reason) == (0, "keep", "the program holds it")


@pytest.mark.parametrize("replaces", [True, False])
def test_an_owner_without_the_memory_does_not_count(run, replaces):
    # Megatron-LM's pipelines do this to outputs (deallocate_output_tensor).
    def holds(_step, x):
        if replaces:
            x.data = torch.empty(1)
        else:
            x.untyped_storage().resize_(0)
        return True

    kept, _ = run(4, holds=holds)
    assert kept == 4 * [0]


@pytest.mark.parametrize("options", [{"codec": "zvc"}, {"policy": "static:zvc"}])
def test_a_codec_that_is_named_is_used(run, options):
    kept, _ = run(4, holds=always, **options)
    assert kept == 4 * [0]


def test_a_budget_holds(run):
    kept, _ = run(6, holds=always, budget=128 * KIB)
    assert kept == 6 * [0]


def test_values_that_are_rounded_do_not_depend_on_who_holds_them(run, monkeypatch):
    monkeypatch.setattr("cswap.engine.saved.outliving.must_agree", lambda *, lossy: lossy)
    kept, _ = run(4, holds=always, lossy="int8")
    assert kept == 4 * [0]
    kept, _ = run(4, holds=always)
    assert kept == [0, 1, 2, 3]


def test_a_tensor_that_is_computed_again_stays_if_it_is_held(by_price, monkeypatch):
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-6)
    leaf, w = torch.randn(1024, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)
    kept = []
    with cswap.swapping(min_bytes=0) as engine:
        for holds in (True, True, True, False, False, False):
            engine.begin_step()
            y = nn.functional.gelu(leaf * 2.0)
            loss = (y @ w).sum()
            if not holds:
                del y
            kept.append(engine.stats.kept_by_reason.get("outlives", 0))
            loss.backward()
    assert kept == [0, 1, 2, 3, 3, 3]
