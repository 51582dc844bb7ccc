"""Hazards found in other libraries or by probing PyTorch: each guard is one that can be removed
and then fails here. H numbers are those of docs/limits.md.
"""

from __future__ import annotations

import threading
import weakref
from typing import Any

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional as F  # noqa: N812
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

import cswap
from cswap import hook_stack
from cswap.errors import CswapError
from tests.engine.engines import assert_empty

ALL: dict[str, Any] = {"min_bytes": 0, "codec": "zvc"}
MODIFIED = "has been modified by an inplace operation"
N = 1 << 12


@pytest.fixture
def swapping():
    return lambda **more: cswap.swapping(**{**ALL, **more})


def leaf(*sizes, seed=0, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*sizes, generator=generator).to(dtype).requires_grad_()


# ---------------------------------------------------------------- in place (H1, H2)


@pytest.mark.parametrize("options", [{"min_bytes": 1 << 30}, {"keep_last": 10}, {"budget": "1GiB"}])
def test_h1_a_kept_tensor_that_is_modified_raises_as_without_hooks(swapping, options):
    x = leaf(N)
    y = x.exp()
    with swapping(**options):
        z = y * y
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        z.sum().backward()


def test_h1_a_parameter_that_is_modified_raises(swapping):
    net = nn.Linear(64, 64)
    with swapping():
        y = net(leaf(64, 64))
    with torch.no_grad():
        net.weight.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        y.sum().backward()


def test_h1_a_swapped_tensor_that_is_modified_later_raises_as_without_hooks(swapping):
    x = leaf(N)
    y = x * 1
    with swapping():
        z = (y * y).sum()
    with torch.no_grad():
        y.add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        torch.autograd.grad(z, x)


def test_h1_an_operator_that_writes_while_the_tensor_is_encoded_is_noticed():
    # Versions are counted up when an operator is done: this one has begun before the encode, and
    # is done after it.
    x = leaf(N)
    y = x * 1
    with cswap.swapping(**ALL):
        with torch.no_grad():
            y.numpy()[: N // 2] += 1
        z = (y * y).sum()
    with torch.no_grad():
        y[N // 2 :].add_(1)
    with pytest.raises(RuntimeError, match=MODIFIED):
        torch.autograd.grad(z, x)


@pytest.mark.xfail(strict=True, reason="F.rrelu saves its noise before writing it: pytorch#193671")
def test_h2_rrelu_in_training_mode():
    x = leaf(N)

    def gradient(seed):
        torch.manual_seed(seed)
        return torch.autograd.grad(F.rrelu(x, training=True).sum(), x)[0]

    for seed in range(3):  # in this order: what was written before is there by chance
        with cswap.swapping(**ALL):
            found = gradient(seed)
        assert torch.equal(found, gradient(seed))


# ------------------------------------------------------- parameters (H3), dedupe (H4, H5)


def test_h3_parameters_and_their_views_and_casts_are_never_moved(swapping):
    net = nn.Linear(64, 64)
    with swapping(remat=False) as engine, torch.autocast("cpu", torch.bfloat16):
        net(leaf(64, 64)).sum().backward()
    assert engine.stats.kept_by_reason["parameter"] >= 1
    assert all(e.site.producer != "TBackward0" for e in engine.explain())
    with swapping() as engine:
        F.linear(leaf(64, 64), nn.Parameter(torch.randn(64, 64)).t()).sum().backward()
    assert engine.stats.kept_by_reason["parameter"] == 1


def test_h3_buffers_of_an_installed_model_are_never_moved():
    class Masked(nn.Module):
        def __init__(self):
            super().__init__()
            self.register_buffer("mask", torch.rand(64, 64))

        def forward(self, x):
            return x * self.mask

    with cswap.install(Masked(), **ALL) as handle:
        pass
    net = Masked()
    with cswap.install(net, **ALL) as handle:
        net(leaf(64, 64)).sum().backward()
    assert handle.stats.kept_by_reason == {"parameter": 1}


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_a_mode_that_makes_tensors_without_memory_is_refused_in_backward(codec):
    engine = cswap.swapping(min_bytes=0, codec=codec, remat=False)._engine
    x = leaf(64, 64) * 2
    for step in range(8):  # with a handle, without one, by order
        engine.begin_step()
        packed = engine.pack(x)
        with FakeTensorMode(), pytest.raises(CswapError, match=r"FakeTensorMode.*Remedy"):
            engine.unpack(packed)
        assert torch.equal(engine.unpack(packed), x), step


def test_h4_a_storage_saved_often_is_encoded_and_decoded_once():
    x = leaf(64, 96)
    with cswap.swapping(**ALL, remat=False) as engine:
        h = x * 2
        q, k, v = h.chunk(3, dim=1)
        y = (q @ k.t()).sum() + (v * v).sum() + (h * h).sum() + h.t().exp().sum()
    stats = engine.stats
    assert stats.deduplicated >= 4
    encodes = sum(c.count for c in stats.by_codec.values())
    y.backward()
    stats = engine.stats
    assert stats.prefetch_hits + stats.prefetch_misses == encodes == stats.swapped


def test_h5_a_square_matrix_and_its_transpose_are_told_apart(swapping):
    x = leaf(64, 64)
    with swapping():
        a = x * 1
        y = (a @ a.t() @ a).sum()
    expected = torch.autograd.grad((x @ x.t() @ x).sum(), x)[0]
    assert torch.equal(torch.autograd.grad(y, x)[0], expected)


def test_h5_an_address_used_again_is_another_tensor(swapping):
    x = leaf(N)
    with swapping():
        total = torch.zeros(())
        for i in range(20):
            total = total + (x * (i + 1)).square().sum()  # each temporary dies, its address lives
    (found,) = torch.autograd.grad(total, x)
    expected = torch.autograd.grad(sum((x * (i + 1)).square().sum() for i in range(20)), x)[0]
    assert torch.equal(found, expected)


@pytest.mark.parametrize("make", [nn.LSTM, nn.GRU, nn.LSTMCell], ids=lambda m: m.__name__)
def test_parts_of_a_storage_that_count_versions_for_themselves(swapping, make):
    torch.manual_seed(0)
    net = make(32, 64)
    x = leaf(8, 32) if make is nn.LSTMCell else leaf(5, 8, 32)

    def gradients():
        net.zero_grad()
        out = net(x)
        out[0].square().sum().backward()
        return [p.grad.clone() for p in net.parameters()]

    expected = gradients()
    with swapping():
        for _ in range(3):
            assert all(torch.equal(a, b) for a, b in zip(gradients(), expected, strict=True))


# ---------------------------------------------------------- several uses (H9-H15)


def test_h11_saved_tensors_may_be_asked_for_often(swapping):
    class Twice(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            ctx.save_for_backward(x)
            return x.exp()

        @staticmethod
        def backward(ctx, grad):
            (a,), (b,) = ctx.saved_tensors, ctx.saved_tensors
            assert torch.equal(a, b)
            return grad * a.exp()

    x = leaf(N)
    with swapping() as engine:
        y = Twice.apply(x * 1)
        z = (x * 1).sigmoid()
    saved = z.grad_fn._saved_result
    assert torch.equal(saved, z)
    first = torch.autograd.grad(y.sum(), x, retain_graph=True)[0]
    second = torch.autograd.grad(y.sum(), x)[0]
    assert torch.equal(first, second)
    assert torch.equal(first, x.exp())
    del y, z, saved
    assert_empty(engine)


@pytest.mark.parametrize("inside", [True, False])
def test_h12_double_backward(swapping, inside):
    x = leaf(N)

    def second(engine=None):
        y = (x**3).sum()
        (g,) = torch.autograd.grad(y, x, create_graph=True)
        return torch.autograd.grad(g.square().sum(), x)[0]

    expected = second()
    with swapping():
        if inside:
            assert torch.equal(second(), expected)
        y = (x**3).sum()
    (g,) = torch.autograd.grad(y, x, create_graph=True)
    assert torch.equal(torch.autograd.grad(g.square().sum(), x)[0], expected)


def test_h13_two_forwards_before_one_backward_and_a_branch_that_is_never_used(swapping):
    x = leaf(N)
    with swapping() as engine:
        a, b, unused = (x * 2).exp(), (x * 3).sigmoid(), (x * 5).tanh()
    expected = torch.autograd.grad((x * 2).exp().sum() + (x * 3).sigmoid().sum(), x)[0]
    assert torch.equal(torch.autograd.grad(a.sum() + b.sum(), x)[0], expected)
    del a, b, unused
    assert_empty(engine)


def test_h13_exceptions_in_forward_and_backward_leave_nothing_behind(swapping):
    class Breaks(nn.Module):
        def forward(self, x):
            self.kept = (x * 2).exp()
            raise ValueError("forward")

    net = nn.Sequential(nn.Linear(64, 64), Breaks())
    with cswap.install(net, **ALL) as handle:
        with pytest.raises(ValueError, match="forward"):
            net(leaf(64, 64))
        assert hook_stack.top(True) is None
        assert handle.engine.scopes.current.path == ""
        del net[1].kept
    assert_empty(handle.engine)
    x = leaf(N)
    with swapping() as engine:
        y = (x * 2).exp()
        y.register_hook(lambda _: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        y.sum().backward()
    del y
    assert_empty(engine)


def test_h15_an_output_that_is_never_used_is_freed_without_backward(swapping):
    class Out(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            y = x.exp()
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            return grad * ctx.saved_tensors[0]

    for options in ({}, {"min_bytes": 1 << 30}, {"keep_last": 100}):
        with swapping(**options) as engine:
            y = Out.apply(leaf(N))
            gone = weakref.ref(y)
            del y
        assert gone() is None
        assert_empty(engine)


def test_nested_contexts_and_several_engines(swapping):
    x = leaf(N)
    with swapping() as outer:
        a = (x * 2).exp()
        with cswap.swapping(min_bytes=0, codec="rle") as inner:
            b = (x * 3).exp()
        c = (x * 4).exp()
    expected = torch.autograd.grad(((x * 2).exp() + (x * 3).exp() + (x * 4).exp()).sum(), x)[0]
    assert torch.equal(torch.autograd.grad((a + b + c).sum(), x)[0], expected)
    assert outer.stats.packed
    assert inner.stats.packed


def test_threads_forward_in_one_backward_in_another(swapping):
    x = leaf(N)
    expected = torch.autograd.grad((x * 2).exp().sum(), x)[0]
    found = []

    def forward():
        with swapping():
            found.append((x * 2).exp().sum())

    def backward(y):
        found.append(torch.autograd.grad(y, x)[0])

    for _ in range(5):
        found.clear()
        for target, args in ((forward, ()), (lambda: backward(found[0]), ())):
            thread = threading.Thread(target=target, args=args)
            thread.start()
            thread.join()
        assert torch.equal(found[1], expected)


@pytest.mark.parametrize(
    "options",
    [{}, {"codec": "raw"}, {"keep_last": 3}, {"budget": 1 << 16}, {"verify": True}],
    ids=str,
)
@pytest.mark.parametrize("rounds", [6, pytest.param(20, marks=pytest.mark.slow)])
def test_several_threads_on_one_engine(options, rounds):
    weights = [leaf(64, 64, seed=i) for i in range(3)]
    shared = torch.randn(4 * 128, 64)  # each thread saves a part of it

    def gradients(i):
        x = shared[128 * i : 128 * (i + 1)]
        y = torch.relu(x @ weights[0]) * x
        y = torch.sin(y @ weights[1]) @ weights[2]
        return torch.autograd.grad(y.square().sum(), weights)

    expected = [gradients(i) for i in range(4)]
    wrong: list[bool] = []
    with cswap.swapping(**{**ALL, **options}) as engine:
        pass

    def work(i):
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            for _ in range(rounds):
                wrong.extend(
                    not torch.equal(a, b) for a, b in zip(gradients(i), expected[i], strict=True)
                )

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(wrong) == 4 * rounds * 3  # no thread ended early
    assert not any(wrong)
    assert_empty(engine)


def test_several_threads_on_one_module():
    net = nn.Sequential(nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 64))
    x = torch.randn(256, 64)
    expected = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
    wrong: list[bool] = []

    def work():
        for _ in range(15):
            found = torch.autograd.grad(net(x).square().sum(), list(net.parameters()))
            wrong.extend(not torch.equal(a, b) for a, b in zip(found, expected, strict=True))

    with cswap.install(net, **ALL) as handle:
        threads = [threading.Thread(target=work) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert len(wrong) == 4 * 15 * 4
    assert not any(wrong)
    assert_empty(handle.engine)


# ----------------------------------------------------------- layouts and kinds (H16-H20)


def test_h16_func_transforms_and_vmap_work(swapping):
    x = torch.randn(N)
    with swapping():
        assert torch.equal(torch.func.grad(lambda t: (t * t).sum())(x), 2 * x)
        assert torch.equal(torch.vmap(lambda t: t * 2)(x), x * 2)


def test_h17_tracing_is_left_alone(swapping):
    net = nn.Sequential(nn.Linear(64, 64), nn.Sigmoid())
    x = torch.randn(4, 64)
    from torch.fx.experimental.proxy_tensor import make_fx

    def gradient(t):
        t = t.detach().requires_grad_()
        return torch.autograd.grad((t * t).sum(), t)[0]

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        plain = [n.name for n in make_fx(gradient)(x).graph.nodes]  # torch's own hook cost
    with swapping() as engine:
        assert [n.name for n in make_fx(gradient)(x).graph.nodes] == plain
    assert set(engine.stats.kept_by_reason) <= {"tracing", "subclass"}
    with swapping():
        with FakeTensorMode():
            y = torch.randn(64, 64, requires_grad=True)
            (y * y).sum().backward()
            assert y.grad is not None
        assert net(x).shape == (4, 64)


LAYOUTS = {
    "permuted": lambda x: x.permute(2, 0, 1),
    "sliced": lambda x: x[:, ::2, 1:],
    "expanded": lambda x: x[:, :1].expand(-1, 50, -1),
    "channels last": lambda x: x.unsqueeze(0).to(memory_format=torch.channels_last),
    "windows": lambda x: x.unfold(1, 3, 1),
    "one element": lambda x: x[0, 0, 0],
    "half": lambda x: x[4:],
    "sixteenth": lambda x: x[:1],
    "diagonal": lambda x: x[0].diagonal(),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("options", [{}, {"keep_last": 100}], ids=["swapped", "kept"])
def test_h18_h19_restored_with_the_very_same_sizes_strides_and_bits(swapping, name, options):
    x = leaf(8, 16, 12)
    seen = []

    class Look(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            ctx.save_for_backward(t)
            return t.sum()

        @staticmethod
        def backward(ctx, grad):
            seen.append(ctx.saved_tensors[0])
            return grad.expand(seen[-1].shape)

    t = LAYOUTS[name](x * 1)
    with swapping(**options):
        y = Look.apply(t)
    y.backward()
    (found,) = seen
    assert (found.shape, found.stride(), found.dtype) == (t.shape, t.stride(), t.dtype)
    assert torch.equal(found, t)
    if name not in ("sixteenth", "one element", "sliced", "diagonal"):
        assert found.storage_offset() == t.storage_offset()


def test_conjugate_and_negative_views(swapping):
    x = leaf(N, dtype=torch.complex64)

    def gradient():
        z = (x * (1 + 2j)).conj()
        w = z.imag  # a negative view
        return torch.autograd.grad((z * z).real.sum() + (w * w).sum(), x)[0]

    expected = gradient()
    with swapping():
        assert torch.equal(torch.view_as_real(gradient()), torch.view_as_real(expected))


def test_what_cannot_be_swapped_is_kept_and_counted(swapping):
    class Mine(torch.Tensor):
        pass

    dense = torch.randn(64, 64)
    with swapping() as engine:
        sparse = dense.to_sparse()
        torch.sparse.mm(sparse, leaf(64, 64)).sum().backward()
        mine = torch.randn(64, 64).as_subclass(Mine).requires_grad_()
        (mine * mine).sum().backward()
    kept = engine.stats.kept_by_reason
    assert kept["layout"] >= 1
    assert kept["subclass"] >= 1


# ------------------------------------------------------- with other hooks (H26), checkpoint


@pytest.mark.parametrize("reentrant", [True, False])
@pytest.mark.parametrize("around", [True, False])
@pytest.mark.filterwarnings("ignore:.*respect_saved_tensors_hooks.*")
def test_checkpoint_inside_and_around(swapping, reentrant, around):
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    x = leaf(32, 64)

    def inner(t):
        if around:
            with swapping():
                return net(t).square()
        return net(t).square()

    def gradients(block):
        net.zero_grad()
        checkpoint(block, x, use_reentrant=reentrant).sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    expected = gradients(lambda t: net(t).square())
    if around:
        found = gradients(inner)
    else:
        with swapping():
            found = gradients(inner)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.filterwarnings("ignore:.*respect_saved_tensors_hooks.*")
def test_what_selective_checkpointing_keeps_is_not_seen(swapping):
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh())
    x = leaf(32, 64)
    kept = []

    def policy(_context, operator, *_args, **_kwargs):
        kept.append(operator is torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if kept[-1] else CheckpointPolicy.PREFER_RECOMPUTE

    def gradients():
        net.zero_grad()
        y = checkpoint(
            net,
            x,
            use_reentrant=False,
            context_fn=lambda: create_selective_checkpoint_contexts(policy),
        )
        y.square().sum().backward()
        return [p.grad.clone() for p in net.parameters() if p.grad is not None]

    expected = gradients()
    kept.clear()
    with swapping() as engine:
        found = gradients()
    assert sum(kept) == 2  # as many products are kept
    # The argument and the square's; of the region nothing.
    assert engine.stats.packed == 2
    assert all(map(torch.equal, found, expected))


def test_h26_with_save_on_cpu_inside_and_outside(swapping):
    x = leaf(N)
    expected = torch.autograd.grad((x * 2).exp().sum(), x)[0]
    with swapping() as engine, torch.autograd.graph.save_on_cpu():
        y = (x * 2).exp()
    assert engine.stats.packed == 0  # only the innermost pair runs
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)
    with torch.autograd.graph.save_on_cpu(), swapping() as engine:
        y = (x * 2).exp()
    assert engine.stats.packed > 0
    assert torch.equal(torch.autograd.grad(y.sum(), x)[0], expected)


def test_inference_mode_and_no_grad(swapping):
    net = nn.Linear(64, 64)
    with swapping() as engine:
        with torch.inference_mode():
            net(torch.randn(8, 64))
        with torch.no_grad():
            net(torch.randn(8, 64))
    assert engine.stats.packed == 0
