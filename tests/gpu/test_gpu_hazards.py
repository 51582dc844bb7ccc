"""Streams, threads and autograd's own ways, on a GPU: gradients stay right, nothing stays behind.

Codecs are made slow on their stream here: a missing wait becomes a wrong gradient.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import cswap
from tests.engine.engines import assert_empty

pytestmark = pytest.mark.gpu

ALL: dict[str, Any] = {"min_bytes": 0, "codec": "zvc"}
MODIFIED = "has been modified by an inplace operation"


def assert_same(found, expected):
    assert len(found) == len(expected) > 0
    for mine, its in zip(found, expected, strict=True):
        assert torch.equal(mine, its)


def batch(device, rows=512, width=1024):
    generator = torch.Generator(device).manual_seed(1)
    return torch.randn(rows, width, device=device, generator=generator)


@pytest.mark.parametrize(
    "codec", ["raw", "zvc", "csr", "rle", "expk", "bitpack", "zvc+expk", "auto"]
)
def test_gradients_are_those_without_swapping(layers, gradients, device, slow, codec):
    net, x = layers(6), batch(device)
    expected = gradients(net, x)
    if codec != "auto":
        slow(codec)
    with cswap.install(net, **{**ALL, "codec": codec}) as handle:
        for _ in range(3):
            assert_same(gradients(net, x), expected)
    stats = handle.stats
    assert stats.swapped > 0
    assert stats.fallbacks == 0, stats.fallbacks_by_reason


def test_memory_of_a_swapped_tensor_is_not_given_away_before_its_encode(
    layers, gradients, device, slow
):
    """While a slow encode reads, the allocator hands out whatever was freed too early."""
    net, x = layers(6), batch(device)
    expected = gradients(net, x)
    slow("zvc", cycles=20_000_000)
    with cswap.install(net, **ALL):
        loss = net(x).square().sum()
        junk = [torch.full_like(x, float("nan")) for _ in range(30)]
        loss.backward()
        found = [p.grad for p in net.parameters()]
    del junk
    assert_same(found, expected)


def test_a_result_is_not_overwritten_while_backward_reads_it(layers, gradients, device, slow):
    net, x = layers(8), batch(device, 2048)
    expected = gradients(net, x)
    slow("zvc")
    with cswap.install(net, **ALL):
        for _ in range(5):
            assert_same(gradients(net, x), expected)


@pytest.mark.parametrize("backward_on_side", [False, True])
def test_forward_on_a_stream_of_the_users(layers, gradients, device, slow, backward_on_side):
    net, x = layers(6), batch(device)
    expected = gradients(net, x)
    slow("zvc")
    side = torch.cuda.Stream(device)
    with cswap.install(net, **ALL) as handle:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            torch.cuda._sleep(5_000_000)
            loss = net(x).square().sum()
            if backward_on_side:
                loss.backward()
        torch.cuda.current_stream().wait_stream(side)
        if not backward_on_side:
            loss.backward()
        torch.cuda.synchronize()
        found = [p.grad for p in net.parameters()]
    assert_same(found, expected)
    assert handle.stats.fallbacks == 0


def test_a_tensor_saved_on_one_stream_and_used_on_another(device, slow):
    slow("zvc")
    streams = [torch.cuda.Stream(device) for _ in range(3)]
    x = batch(device).requires_grad_()
    torch.cuda.synchronize()
    with cswap.swapping(**ALL):
        y = x
        for i, stream in enumerate(streams):
            stream.wait_stream(streams[i - 1] if i else torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                y = (y * 1.5).relu().exp().sin()
        torch.cuda.current_stream().wait_stream(streams[-1])
    (found,) = torch.autograd.grad(y.sum(), x)
    z = x
    for _ in streams:
        z = (z * 1.5).relu().exp().sin()
    assert_same([found], torch.autograd.grad(z.sum(), x))


def test_several_threads_each_with_a_model(layers, gradients, device):
    nets, x = [layers(4) for _ in range(3)], batch(device)
    expected = gradients(nets[0], x)
    wrong: list[Any] = []

    def work(net):
        try:
            with cswap.install(net, **ALL) as handle, torch.cuda.stream(torch.cuda.Stream(device)):
                for _ in range(8):
                    assert_same(gradients(net, x), expected)
                torch.cuda.current_stream().synchronize()
            assert handle.stats.swapped > 0
        except BaseException as error:
            wrong.append(error)

    torch.cuda.synchronize()
    threads = [threading.Thread(target=work, args=(net,)) for net in nets]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_retain_graph(layers, device, slow):
    net, x = layers(4), batch(device)
    slow("zvc")
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    with cswap.install(net, **ALL) as handle:
        loss = net(x).square().sum()
        for retain in (True, True, False):
            found = torch.autograd.grad(loss, list(net.parameters()), retain_graph=retain)
            assert_same(found, expected)
    del loss
    assert handle.stats.fallbacks == 0


def test_double_backward(device, slow):
    slow("zvc")

    def gradient_of_penalty():
        net = nn.Sequential(nn.Linear(512, 512), nn.Tanh(), nn.Linear(512, 1)).to(device)
        x = batch(device, 512, 512).requires_grad_()
        (first,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        return torch.autograd.grad(first.square().sum(), list(net.parameters())[:3])

    torch.manual_seed(0)
    expected = gradient_of_penalty()
    torch.manual_seed(0)
    with cswap.swapping(**ALL) as engine:
        found = gradient_of_penalty()
    assert_same(found, expected)
    assert_empty(engine)


def test_a_forward_without_backward_and_a_backward_that_fails(layers, device):
    class Fails(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, *grads: Any) -> Any:
            raise ZeroDivisionError

    net, x = layers(4), batch(device)
    with cswap.install(net, **ALL) as handle:
        net(x)
        h = net[3](net[2](Fails.apply(net[1](net[0](x)))))
        with pytest.raises(ZeroDivisionError):
            h.sum().backward()
        del h
        assert_empty(handle.engine)


@pytest.mark.parametrize("settle", [False, True], ids=["under way", "stored"])
def test_in_place_after_saving_is_autograds_error(device, slow, settle):
    slow("zvc")
    for _ in range(5):
        x = batch(device).requires_grad_()
        y = x * 1
        with cswap.swapping(**ALL) as engine:
            z = (y * y).sum()
        if settle:
            engine.synchronize()
        with torch.no_grad():
            y.add_(1)
        with pytest.raises(RuntimeError, match=MODIFIED):
            torch.autograd.grad(z, x)


def test_views_dedupe_strides_and_checkpoints(device, slow):
    slow("zvc")
    conv = nn.Conv2d(16, 16, 3, padding=1, groups=4).to(device)
    x = batch(device, 8, 16 * 64 * 64).view(8, 16, 64, 64)
    x = x.to(memory_format=torch.channels_last).requires_grad_()

    def gradient():
        h = checkpoint(conv, x * 2, use_reentrant=False).relu()
        a, b = h.chunk(2, dim=1)
        y = (a * b).sum() + (h * h.transpose(2, 3)).sum() + h[:, ::3].exp().sum().log()
        return torch.autograd.grad(y, [x, *conv.parameters()])

    torch.backends.cudnn.deterministic = True
    try:
        expected = gradient()
        with cswap.swapping(**ALL) as engine:
            found = gradient()
    finally:
        torch.backends.cudnn.deterministic = False
    assert engine.stats.deduplicated > 0
    assert_same(found, expected)


def test_autocast_keeps_casts_of_parameters(layers, gradients, device):
    net, x = layers(4), batch(device)
    with torch.autocast("cuda", torch.bfloat16):
        expected = gradients(net, x)
        with cswap.install(net, **ALL) as handle:
            found = gradients(net, x)
    assert_same(found, expected)
    assert handle.stats.kept_by_reason["parameter"] >= 3  # all but the first layer's


def test_parameters_stay(layers, gradients, device):
    net, x = layers(4), batch(device)
    places = [p.data_ptr() for p in net.parameters()]
    with cswap.install(net, **ALL):
        gradients(net, x)
    assert [p.data_ptr() for p in net.parameters()] == places


def test_a_spill_to_disk(layers, gradients, device, tmp_path):
    net, x = layers(6), batch(device)
    expected = gradients(net, x)
    options = {**ALL, "host_limit": "2MiB", "spill_dir": tmp_path}
    with cswap.install(net, **options) as handle:
        for _ in range(2):
            assert_same(gradients(net, x), expected)
    assert handle.stats.fallbacks == 0, handle.stats.fallbacks_by_reason


def test_while_a_graph_is_captured_tensors_stay_with_one_warning(layers, gradients, device, caplog):
    net, x = layers(4), batch(device)
    expected = gradients(net, x)
    with cswap.install(net, **ALL) as handle:
        side = torch.cuda.Stream(device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):  # as torch's documentation has it: warm up beside
            for _ in range(3):
                net(x).square().sum().backward()
        torch.cuda.current_stream().wait_stream(side)
        handle.engine.synchronize()
        torch.cuda.synchronize()
        swapped = handle.stats.swapped
        net.zero_grad(set_to_none=True)
        graph = torch.cuda.CUDAGraph()
        with caplog.at_level(logging.WARNING, logger="cswap"), torch.cuda.graph(graph):
            net(x).square().sum().backward()
        assert handle.stats.swapped == swapped
        assert handle.stats.kept_by_reason["capturing"] >= 4
        assert [r.message for r in caplog.records if "captured" in r.message] != []
        assert len(caplog.records) == 1
        graph.replay()
        torch.cuda.synchronize()
        assert_same([p.grad for p in net.parameters()], expected)
    assert swapped > 0


def test_swapping_goes_on_after_a_capture(layers, gradients, device):
    net, x = layers(4), batch(device)
    expected = gradients(net, x)
    graph = torch.cuda.CUDAGraph()
    with cswap.install(net, **ALL) as handle:
        gradients(net, x)
        handle.engine.synchronize()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            net(x).square().sum()
        before = handle.stats.swapped
        assert_same(gradients(net, x), expected)
        assert handle.stats.swapped > before


def test_several_gpus_in_one_process(layers, gradients, slow):
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    slow("zvc")
    first, second = layers(3, device="cuda:0"), layers(3, device="cuda:1")
    x = batch(torch.device("cuda", 0))
    expected = gradients(first, x)
    with cswap.swapping(**ALL) as engine:
        h = first(x)
        second(h.to("cuda:1")).square().sum().backward()
        across = [p.grad.clone() for p in first.parameters()]
        first.zero_grad(set_to_none=True)
    assert engine.stats.fallbacks == 0, engine.stats.fallbacks_by_reason
    second(first(x).to("cuda:1")).square().sum().backward()
    assert_same(across, [p.grad for p in first.parameters()])
    for net, place in ((first, "cuda:0"), (second, "cuda:1")):
        net.zero_grad(set_to_none=True)
        with cswap.install(net, **ALL):
            found = gradients(net, x.to(place))
        assert_same([g.to("cuda:0") for g in found], expected)
    assert torch.cuda.current_device() == 0
