"""Device memory, as torch's allocator counts it: what was swapped is gone, and nothing leaks."""

from __future__ import annotations

import gc
import threading

import pytest
import torch

import cswap
from tests.engine.engines import assert_empty

pytestmark = pytest.mark.gpu

MIB = 1 << 20
WIDTH, ROWS, LAYERS = 4096, 4096, 24
ONE = ROWS * WIDTH * 4
"""Bytes of one activation; each layer saves one."""


def step_and_peak(net, x, before_backward=lambda: None):
    """Growth of allocated memory at the peak of a step, and after its forward."""
    torch.cuda.synchronize()
    gc.collect()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    loss = net(x).sum()
    before_backward()
    torch.cuda.synchronize()
    after_forward = torch.cuda.memory_allocated() - before
    loss.backward()
    torch.cuda.synchronize()
    return torch.cuda.max_memory_allocated() - before, after_forward


@pytest.fixture
def net(layers):
    model = layers(LAYERS, WIDTH)
    model(torch.randn(8, WIDTH, device="cuda")).sum().backward()  # gradients are there from now on
    return model


@pytest.mark.parametrize("codec", ["raw", "zvc", "int8", "auto"])
def test_what_was_swapped_leaves_the_device(net, device, codec):
    x = torch.randn(ROWS, WIDTH, device=device)
    kept_peak, kept_after = step_and_peak(net, x)
    assert kept_after >= LAYERS * ONE  # the test would show it if nothing were swapped
    with cswap.install(net, codec=codec) as handle:
        # In step with the swaps: how far a computation runs ahead of the link is not tested here.
        wait = [
            m.register_forward_hook(lambda *_: handle.engine.synchronize()) for m in net.modules()
        ]
        step_and_peak(net, x)  # compiles, fills pools
        scratch = handle.engine.scratch_bytes
        peak, after = step_and_peak(net, x, handle.engine.synchronize)
        for hook in wait:
            hook.remove()
        assert handle.stats.fallbacks == 0, handle.stats.fallbacks_by_reason
        assert handle.stats.swapped >= 2 * LAYERS
    # In backward: two gradients, a weight's before it is added, one decoded on demand and three
    # ahead of their use (Staging), and the encodings of these four.
    assert after <= 3 * ONE + scratch
    assert peak <= 12 * ONE + scratch
    assert peak < 0.5 * kept_peak


def test_peak_falls_without_waiting_for_swaps(net, device):
    x = torch.randn(ROWS, WIDTH, device=device)
    kept_peak, _ = step_and_peak(net, x)
    with cswap.install(net, codec="zvc"):
        step_and_peak(net, x)
        peak, _ = step_and_peak(net, x)
    assert peak < 0.6 * kept_peak


def test_a_budget_stays_on_the_device(net, device):
    x = torch.randn(ROWS, WIDTH, device=device)
    with cswap.install(net, codec="zvc", budget=4 * ONE) as handle:
        net(x).sum().backward()  # which shows which tensors are the newest
        loss = net(x).sum()
        handle.engine.synchronize()
        assert 3 * ONE <= handle.stats.kept_bytes_by_reason["budget"] <= 4 * ONE
        loss.backward()


def test_a_goal_is_held_by_the_allocators_peak(net, device):
    x = torch.randn(ROWS, WIDTH, device=device)
    kept_peak, _ = step_and_peak(net, x)
    limit = torch.cuda.memory_allocated() + int(0.7 * kept_peak)
    with cswap.install(net, fit=limit) as handle:
        for _ in range(24):
            step_and_peak(net, x)
        assert handle.goal is not None
        assert handle.goal.held, str(handle.goal)
        peak, _ = step_and_peak(net, x)
    assert torch.cuda.memory_allocated() + peak <= limit


def test_nothing_moves_while_all_fits_the_device(net, device):
    x = torch.randn(ROWS, WIDTH, device=device)
    with cswap.install(net, fit="device") as handle:
        for _ in range(24):
            step_and_peak(net, x)
        before = handle.stats.swapped
        step_and_peak(net, x)
        assert handle.stats.swapped == before > 0
        assert handle.goal is not None
        assert set(handle.goal.actions) == {"keep"}, str(handle.goal)


def pinned_bytes():
    stats = getattr(torch.cuda.memory, "host_memory_stats", None)
    return 0 if stats is None else stats()["allocated_bytes.current"]


@pytest.mark.parametrize("codec", ["raw", "zvc", "int8"])
def test_nothing_leaks_over_1000_steps(layers, device, codec):
    net = layers(3, 256)
    x = torch.randn(128, 256, device=device)

    def steps(n):
        for i in range(n):
            loss = net(x).square().sum()
            if i % 5:  # and now and then a forward without a backward
                loss.backward(retain_graph=i % 2 == 0)
        del loss
        net.zero_grad(set_to_none=True)
        handle.engine.synchronize()
        gc.collect()
        torch.cuda.synchronize()
        return torch.cuda.memory_allocated(), pinned_bytes(), threading.active_count()

    with cswap.install(net, codec=codec, min_bytes=0) as handle:
        before = steps(100)
        after = steps(1000)
        assert_empty(handle.engine)
        assert handle.stats.fallbacks == 0, handle.stats.fallbacks_by_reason
        assert len(handle.engine._state.aliases.live()) == 0
    # scratch that a busier moment needed stays in its pool
    assert after[0] <= before[0] + handle.engine.scratch_bytes
    assert after[1] <= before[1] + 8 * MIB
    assert after[2] == before[2]


def test_an_engine_that_is_gone_leaves_no_memory(layers, device):
    net = layers(3, 1024)
    x = torch.randn(1024, 1024, device=device)

    def use():
        with cswap.install(net, codec="zvc", min_bytes=0) as handle:
            net(x).sum().backward()
            handle.engine.synchronize()
        net.zero_grad(set_to_none=True)

    use()
    gc.collect()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        use()
    gc.collect()
    torch.cuda.synchronize()
    assert torch.cuda.memory_allocated() <= before + 4 * MIB
