"""`cswap.inlined`: codecs inside of the graphs that torch.compile makes."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.compiled import hooks
from cswap.compiled.codecs import codec_for, decode, encode
from cswap.errors import ConfigError

pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit:DeprecationWarning")  # torch's own

BACKEND = "aot_eager_decomp_partition"
"""Without code generation, with the partitioner that Inductor uses."""


@pytest.fixture(autouse=True)
def _fresh():
    torch._dynamo.reset()
    torch.manual_seed(0)
    yield
    torch._dynamo.reset()


class Block(nn.Module):
    """A transformer's block."""

    def __init__(self, width=64, heads=4):
        super().__init__()
        self.heads, self.norm = heads, nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        b, t, d = x.shape
        q, k, v = self.qkv(x).view(b, t, 3, self.heads, -1).permute(2, 0, 3, 1, 4)
        y = functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(y.transpose(1, 2).reshape(b, t, d))
        return x + self.down(functional.gelu(self.up(self.norm(x))))


def compiled(model, **options):
    return torch.compile(model, backend=BACKEND, **options)


def saved_bytes(loss, model):
    """Bytes of what compiled graphs saved, parameters left out, each storage once."""
    owned = {p.untyped_storage().data_ptr() for p in model.parameters()}
    nodes, seen, found = [loss.grad_fn], set(), {}
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        nodes += [n for n, _ in node.next_functions]
        for x in node.saved_tensors if "Compiled" in type(node).__name__ else ():
            storage = x.untyped_storage()
            if storage.data_ptr() not in owned:
                found[storage.data_ptr()] = storage.nbytes()
    return sum(found.values())


def step(model, plain, x, around=None):
    """Bytes saved and gradients of a step of ``model``, compiled from ``plain``."""
    plain.zero_grad()
    if around is None:
        loss = model(x).square().mean()
    else:
        with around:
            loss = model(x).square().mean()
    held = saved_bytes(loss, plain)
    loss.backward()
    return held, [p.grad.clone() for p in plain.parameters()]


def worst(found, wanted):
    """Largest relative error of a gradient, by its norm."""
    pairs = zip(found, wanted, strict=True)
    return max(float((a - b).norm() / (b.norm() + 1e-30)) for a, b in pairs)


@pytest.mark.parametrize(
    ("lossy", "less", "most"),
    [
        ("int8", 2.5, 0.03),
        pytest.param("bf16", 1.6, 0.01, marks=pytest.mark.slow),
    ],
)
def test_graphs_save_less_and_gradients_are_near(lossy, less, most):
    plain = Block()
    model, x = compiled(plain), torch.randn(4, 128, 64)
    whole, wanted = step(model, plain, x)
    for _ in range(2):  # the second step finds the graphs compiled
        held, found = step(model, plain, x, cswap.inlined(lossy, min_bytes=1024))
        assert held * less <= whole
        assert 0 < worst(found, wanted) <= most
    again, unchanged = step(model, plain, x)
    assert again == whole
    assert all(map(torch.equal, unchanged, wanted))


def test_masks_are_bits_and_bit_equal():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(64, 256), nn.Linear(256, 64)

        def forward(self, x):
            y = self.a(x)
            return self.b(torch.where(y.cumsum(-1) > 0, y, y * 0.5))

    plain = Masked()
    model, x = compiled(plain), torch.randn(64, 64)
    whole, wanted = step(model, plain, x)
    held, found = step(model, plain, x, cswap.inlined(min_bytes=0))
    assert whole - held >= 64 * 256 * 7 // 8 - 64  # a byte each before, a bit each now
    assert all(map(torch.equal, found, wanted))


def test_what_runs_eagerly_is_left_alone():
    plain, x = Block(), torch.randn(4, 32, 64)
    wanted = step(plain, plain, x)[1]
    found = step(plain, plain, x, cswap.inlined("int8", min_bytes=0))[1]
    assert all(map(torch.equal, found, wanted))
    y = torch.randn(8, 8, requires_grad=True)
    with cswap.inlined("int8", min_bytes=0):
        z = y.exp()
        loss = z.sum()
    z.detach().add_(1.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()


def test_exponents_and_statistics_keep_their_bits():
    kept = []

    def spy(saved, lossy, min_bytes):
        packed = hooks.pack(saved, lossy, min_bytes)
        kept.append((tuple(saved.shape), isinstance(packed, torch.Tensor)))
        return packed

    pair = (hooks._graph(spy, "int8", 0, name="spy"), hooks._graph(hooks.unpack, name="unspy"))
    plain = nn.Linear(32, 96)
    model = compiled(lambda x: functional.cross_entropy(plain(x) * 2.0, torch.arange(48) % 96))
    with torch.autograd.graph.saved_tensors_hooks(*pair):
        loss = model(torch.randn(48, 32, requires_grad=True))
    loss.backward()
    assert kept
    assert all(is_kept for shape, is_kept in kept if shape in ((48, 96), (48, 1)))


def small():
    return nn.Sequential(nn.LayerNorm(64), nn.Linear(64, 64), nn.GELU(), nn.Linear(64, 64))


# Tracing the whole Block with symbols for sizes takes 20 s.
@pytest.mark.slow
@pytest.mark.parametrize("make", [small, Block])
def test_shapes_that_change_are_traced_once(make):
    plain = make()
    model = compiled(plain, dynamic=True)
    for n in (24, 32, 40):
        x = torch.randn(2, n, 64)
        wanted = step(plain, plain, x)[1]
        found = step(model, plain, x, cswap.inlined("int8", min_bytes=0))[1]
        assert worst(found, wanted) <= 0.03


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("shape", [(256,), (3, 384), (5, 7), (4, 1), (2, 0)])
def test_int8_is_within_a_step_and_keeps_zeros(dtype, shape):
    x = torch.randn(shape).relu().to(dtype)
    if x.numel():
        x.flatten()[-1] = 1e-3  # far below a step
    assert codec_for(x, "int8") == "int8"
    if not x.numel():
        return
    y = decode(*encode(x, "int8"))
    assert (y.dtype, y.shape) == (dtype, x.shape)
    assert torch.equal(y == 0, x == 0)
    assert float((y.double() - x.double()).abs().max()) <= 1.05 * float(x.double().max()) / 255


def test_int8_of_extremes():
    x = torch.stack([torch.full((128,), v) for v in (0.0, -2.5, 3e38, 1e-40)])
    y = decode(*encode(x, "int8"))
    assert torch.equal(y[0], x[0])
    assert torch.allclose(y[1:3], x[1:3], rtol=1e-2)
    assert y[3].abs().max() <= 1e-38
    opposite = torch.full((128,), 3e38)
    opposite[::2] = -3e38
    assert torch.allclose(decode(*encode(opposite, "int8")), opposite, rtol=1e-2)
    for sign in (1, -1):
        one_sided = sign * torch.linspace(1e-6, 1, 128)
        one_sided[7] = -sign * 1e-6
        back = decode(*encode(one_sided, "int8"))
        assert torch.equal(back.sign(), one_sided.sign())
        assert (back - one_sided).abs().max() <= 1.01 / 255
    tiny = torch.zeros(128)
    tiny[3], tiny[4] = 1e-40, -1e-40
    assert torch.equal(decode(*encode(tiny, "int8")).sign(), tiny.sign())
    x[1, 5] = torch.nan
    assert decode(*encode(x, "int8"))[1].isnan().all()


@pytest.mark.parametrize("n", [8, 64, 1024])
def test_masks_come_back(n):
    x = torch.rand(3, n) < 0.3
    assert codec_for(x, "off") == "mask"
    name, dtype, packed = encode(x, "mask")
    assert packed.shape == (3, n // 8)
    assert torch.equal(decode(name, dtype, packed), x)
    assert codec_for(torch.ones(3, 9, dtype=torch.bool), "int8") is None


def test_codecs_that_do_not_apply_are_none():
    assert codec_for(torch.tensor(1.0), "int8") is None
    assert codec_for(torch.ones(4, dtype=torch.int64), "int8") is None
    assert codec_for(torch.ones(4), "off") is None
    assert codec_for(torch.ones(4, dtype=torch.float16), "bf16") is None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("int4",), "lossy='int4': must be one of off, bf16, int8"),
        ((0.01,), "lossy=0.01: must be one of"),
    ],
)
def test_wrong_options_are_refused(options, words):
    with pytest.raises(ConfigError, match=words.replace(".", r"\.")):
        cswap.inlined(*options)
    with pytest.raises(ConfigError, match="min_bytes='much'"):
        cswap.inlined(min_bytes="much")


def test_a_torch_that_traces_no_hooks_swaps_between_the_graphs(monkeypatch, caplog):
    from torch._functorch._aot_autograd import utils

    monkeypatch.delattr(utils, "saved_tensors_hooks_are_inlineable")
    hooks._can_trace.cache_clear()
    with caplog.at_level(logging.WARNING, "cswap"):
        around = cswap.inlined("int8", min_bytes=0)
        with cswap.inlined("int8", min_bytes=0) as engine:
            torch.randn(64, 64, requires_grad=True).sin().sum().backward()
    hooks._can_trace.cache_clear()
    assert type(around).__name__ == "Swapping"
    assert engine.stats.packed
    assert caplog.text.count("traces no hooks") == 1


@pytest.mark.slow
def test_inductor_fuses_it():
    plain = nn.Sequential(Block(), Block())
    model, x = torch.compile(plain), torch.randn(4, 128, 64)
    whole, wanted = step(model, plain, x)
    held, found = step(model, plain, x, cswap.inlined("int8", min_bytes=1024))
    assert held * 2.5 <= whole
    assert 0 < worst(found, wanted) <= 0.03
