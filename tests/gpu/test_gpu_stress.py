"""Hours of use in short: random streams, sizes, dtypes and codecs, and what can fail does."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest
import torch

import cswap
from cswap.codecs.registry import get_codec
from cswap.devices.cuda import CudaDevice
from tests.engine.engines import assert_empty
from tests.engine.operators import lossless_codecs

pytestmark = pytest.mark.gpu

SECONDS = 20.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def random_graph(draw, device, streams):
    """A function that computes a gradient the same way every time."""
    dtype = draw.choice(DTYPES)
    sizes = (draw.choice((1, 7, 64, 1000)), draw.choice((3, 256, 4097)))
    seed, n_layers = draw.randrange(1 << 20), draw.randint(1, 6)
    operators = [
        draw.choice(("relu", "exp", "mul", "chunk", "matmul", "transpose")) for _ in range(n_layers)
    ]
    places = [draw.choice(streams) for _ in range(n_layers)]

    def gradient():
        generator = torch.Generator(device).manual_seed(seed)
        x = torch.randn(sizes, generator=generator, device=device).to(dtype).requires_grad_()
        y, last = x, torch.cuda.current_stream()
        for operator, stream in zip(operators, places, strict=True):
            stream.wait_stream(last)
            with torch.cuda.stream(stream):
                y = apply(operator, y)
            last = stream
        torch.cuda.current_stream().wait_stream(last)
        return torch.autograd.grad(y.float().square().mean(), x)[0]

    return gradient


def apply(operator, y):
    if operator == "relu":
        return (y - 0.5).relu()
    if operator == "exp":
        return (-y.abs()).exp()
    if operator == "mul":
        return y * y.sigmoid()
    if operator == "chunk":
        return torch.cat([part * part.tanh() for part in y.chunk(2, dim=-1)], dim=-1)
    if operator == "matmul":
        return torch.softmax(y @ y.t(), dim=-1) @ y
    return (y.t() * y.t().tanh()).t()


def test_random_graphs_on_random_streams(device):
    draw = random.Random(0)
    streams = [torch.cuda.current_stream(), *(torch.cuda.Stream(device) for _ in range(3))]
    codecs = ("auto", *lossless_codecs("cuda"))
    end, n = time.monotonic() + SECONDS, 0
    while time.monotonic() < end:
        gradient = random_graph(draw, device, streams)
        expected = gradient()
        if not torch.equal(expected, gradient()):
            continue  # not repeatable even without cswap
        options: dict[str, Any] = {
            "min_bytes": draw.choice((0, 4096)),
            "keep_last": draw.choice((0, 0, 2)),
        }
        with cswap.swapping(codec=draw.choice(codecs), **options) as engine:
            for _ in range(draw.randint(1, 3)):
                assert torch.equal(gradient(), expected), (n, options)
        assert engine.stats.fallbacks == 0, engine.stats.fallbacks_by_reason
        n += 1
        if n % 10 == 0:
            assert_empty(engine)
    assert n > 20


class InjectedError(RuntimeError):
    """Raised on purpose."""


def failing(method, draw, share):
    def run(*args, **options):
        if draw.random() < share:
            raise InjectedError("on purpose")
        return method(*args, **options)

    return run


@pytest.mark.parametrize("share", [0.3, 1.0])
def test_an_encode_that_fails_costs_no_gradient(layers, gradients, device, monkeypatch, share):
    net, x = layers(6), torch.randn(512, 1024, device=device)
    expected = gradients(net, x)
    codec = get_codec("zvc")
    monkeypatch.setattr(codec, "encode_flat", failing(codec.encode_flat, random.Random(0), share))
    with cswap.install(net, codec="zvc", min_bytes=0) as handle:
        for _ in range(5):
            found = gradients(net, x)
            assert all(map(torch.equal, found, expected))
    assert handle.stats.fallbacks > 0


def test_memory_that_is_refused_in_forward_costs_no_gradient(
    layers, gradients, device, monkeypatch
):
    net, x = layers(6), torch.randn(512, 1024, device=device)
    expected = gradients(net, x)
    draw, in_forward = random.Random(0), threading.Event()

    def refusing(method):
        def run(*args):
            if in_forward.is_set() and draw.random() < 0.3:
                raise MemoryError("on purpose")
            return method(*args)

        return run

    monkeypatch.setattr(CudaDevice, "host_memory", refusing(CudaDevice.host_memory))
    with cswap.install(net, codec="zvc", min_bytes=0) as handle:
        for _ in range(5):
            in_forward.set()
            loss = net(x).square().sum()
            handle.engine.synchronize()
            in_forward.clear()  # what is to be decoded needs its memory
            found = torch.autograd.grad(loss, list(net.parameters()))
            assert all(map(torch.equal, found, expected))
    stats = handle.stats
    kept = [stats.kept_by_reason.get(reason, 0) for reason in ("host_limit", "memory")]
    assert stats.fallbacks + sum(kept) > 0


def test_a_device_that_is_nearly_full(layers, gradients, device):
    net, x = layers(6), torch.randn(512, 1024, device=device)
    expected = gradients(net, x)
    torch.cuda.empty_cache()
    with cswap.install(net, codec="zvc", min_bytes=0) as handle:
        assert all(map(torch.equal, gradients(net, x), expected))
        handle.engine.synchronize()
        # 256 MiB stay free; the step needs a tenth of that
        free, _total = torch.cuda.mem_get_info()
        hoard = torch.empty(max(0, free - (256 << 20)), dtype=torch.uint8, device=device)
        try:
            assert all(map(torch.equal, gradients(net, x), expected))
        finally:
            del hoard
            torch.cuda.empty_cache()
