"""Saved tensors that slots take (`cswap.engine.replay`)."""

from __future__ import annotations

import threading
from collections import Counter
from math import prod
from typing import Any, Final

import pytest
import torch
from torch import nn

import cswap
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.replay.in_line_slot import InLineSlot
from cswap.engine.replay.slot import CodecSlot
from cswap.engine.saved import reclaim, tensor_check
from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.packed import PackedView
from tests.engine.engines import assert_empty

STEPS = 6
"""By the third step a place has an order."""

N = 1 << 12

RAW: Final[dict[str, Any]] = {"min_bytes": 0, "codec": "raw", "remat": False}


@pytest.fixture
def ordered(monkeypatch):
    """The tensors that went by order, in a list."""
    found, take = [], InLineSlot.take

    def noted(self, tensor, *others):
        packed = take(self, tensor, *others)
        if packed is not None:
            found.append(tensor)
        return packed

    monkeypatch.setattr(InLineSlot, "take", noted)
    return found


def swapping(codec="raw", **options):
    return cswap.swapping(min_bytes=0, codec=codec, remat=False, **options)


def engine_of(codec="raw", **options):
    return swapping(codec, **options)._engine


def known(engine, x, n=STEPS):
    """Save a tensor in n steps, and ask for it."""
    for _ in range(n):
        engine.begin_step()
        assert torch.equal(engine.unpack(engine.pack(x)), x)
    engine.begin_step()


def result(*sizes, **options):
    """A result of an operator, which counts its versions."""
    return torch.randn(*sizes, requires_grad=True, **options) * 2


# ------------------------------------------------------------- which tensors do


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_a_tensor_that_looks_like_the_last_one_goes_by_order(ordered, codec):
    engine, x = engine_of(codec), result(N)
    known(engine, x)
    assert len(ordered) >= 2
    packed = engine.pack(x)
    assert type(packed) is Encoded
    assert ordered[-1] is x
    assert torch.equal(engine.unpack(packed), x)
    assert torch.equal(engine.unpack(packed), x)  # once more
    del packed
    assert_empty(engine)


OTHERS = {
    "another size": lambda x: result(64, 63),
    "another layout": lambda x: x.t(),
    "another dtype": lambda x: x.double(),
    "no history": lambda x: x.detach(),
    "a parameter": lambda x: nn.Parameter(x.detach()),
    "a view of a parameter": lambda x: nn.Parameter(x.detach()).view(64, 64),
    "not at the beginning": lambda x: (torch.cat([x, x]) * 2)[64:],
    "a part that is no view": lambda x: torch.unsafe_split(torch.cat([x, x]) * 2, 64)[1],
    "negated": lambda x: torch._neg_view(x),
    "a subclass": lambda x: x.as_subclass(type("Sub", (torch.Tensor,), {})),
    "sparse": lambda x: x.to_sparse(),
    "misaligned": lambda x: misaligned() * 1,
}


def misaligned():
    memory = torch.zeros(64 * 64 * 4 + 4, dtype=torch.uint8)
    return memory[4:].view(torch.float32).view(64, 64).requires_grad_()


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_tensor_at_the_place_is_kept(ordered):
    # The guard raises a C++ exception for it, through the frames of the interpreter.
    engine, x = engine_of(), result(64, 64)
    known(engine, x)
    parts = [torch.randn(32, 64), torch.randn(32, 64)]
    nested = torch.nested.nested_tensor(parts, layout=torch.strided, requires_grad=True) * 2
    back = engine.unpack(engine.pack(nested))
    assert all(map(torch.equal, back.unbind(), nested.unbind()))
    engine.begin_step()

    def batched(t):
        engine.pack(t)
        return t

    several = [torch.randn(64, 64), torch.randn(64, 64)]
    torch.vmap(batched)(torch.nested.nested_tensor(several, layout=torch.strided))


def test_parts_of_a_larger_tensor_at_places_of_whole_ones():
    # The second one is saved where the first one's memory was saved again.
    class Halves(nn.Module):
        def forward(self, x, both):
            h = x * 1.0
            first, second = (h[:64], h[64:]) if both else (h, h[:])
            return first.sin().sum() + (second.cos() * 2.0).sum()

    assert_gradients_stay_right(Halves(), lambda both: ((1 + both) * 64, 64))


def assert_gradients_stay_right(model, sizes):
    """Of steps with ``both=False``, and of one with ``both=True`` when the places are known."""

    def gradient(both):
        x = torch.linspace(0, 1, prod(sizes(both))).view(sizes(both)).requires_grad_()
        return torch.autograd.grad(model(x, both), x)[0]

    wanted = {both: gradient(both) for both in (False, True)}
    with cswap.install(model, **RAW):
        for step in range(2 * STEPS):
            both = step == 2 * STEPS - 2
            assert torch.equal(gradient(both), wanted[both])


@pytest.mark.parametrize("other", OTHERS.values(), ids=OTHERS)
@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_another_tensor_at_the_place_comes_back_as_it_was(ordered, codec, other):
    engine, x = engine_of(codec), result(64, 64)
    known(engine, x)
    y = other(x)
    back = engine.unpack(engine.pack(y))
    assert (back.dtype, back.shape, back.layout) == (y.dtype, y.shape, y.layout)
    if y.layout is torch.strided:
        assert back.stride() == y.stride()
        assert torch.equal(back.resolve_neg(), y.detach().as_subclass(torch.Tensor).resolve_neg())
    else:
        assert torch.equal(back.to_dense(), y.to_dense())
    assert engine.stats.fallbacks == 0


def test_a_tensor_without_memory_is_not_read(ordered):
    # As FSDP leaves them, somewhere in a storage: an offset from no address is an address.
    engine, x = engine_of(), result(N)
    known(engine, x)
    n = len(ordered)
    for offset in (0, 64):
        gone = torch.zeros(N + offset, requires_grad=True).clone()[offset:].detach()
        gone.requires_grad_()
        gone.untyped_storage().resize_(0)
        engine.pack(gone)
        engine.begin_step()
    assert len(ordered) == n


def test_strides_of_sizes_of_one_come_back():
    # The way of a matrix product depends on them, and so the last bit of a gradient.
    engine = engine_of()
    x = (torch.randn(2, 1, 50, requires_grad=True) * 2).transpose(1, 2)
    for _ in range(STEPS):
        engine.begin_step()
        assert engine.unpack(engine.pack(x)).stride() == x.stride() == (50, 1, 50)


def test_a_change_in_place_raises(ordered):
    engine, x = engine_of(), result(N)
    known(engine, x)
    packed = engine.pack(x)
    assert ordered[-1] is x
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.unpack(packed)


VIEWS = {
    "the tensor": lambda x: x,
    "a view of it": lambda x: x.view(-1),
    "what is not a view of autograd's": lambda x: x.detach(),
}


@pytest.mark.parametrize("writer", VIEWS.values(), ids=VIEWS)
@pytest.mark.parametrize("saved", [lambda x: x, lambda x: x.view(64, 64)], ids=["whole", "view"])
def test_a_change_in_place_raises_whoever_makes_it(saved, writer):
    engine = engine_of()
    for _ in range(STEPS):
        engine.begin_step()
        engine.unpack(engine.pack(saved(result(N))))
    engine.begin_step()
    x = result(N)
    y = saved(x)
    packed = engine.pack(y)
    assert type(packed) is Encoded
    written = writer(x)
    del x, y
    with torch.no_grad():
        written.add_(1)
    del written  # as a local variable of a module's forward
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.unpack(packed)


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_memory_that_was_cut_short_is_not_read_beyond_its_end(ordered, codec):
    engine, x = engine_of(codec), result(1 << 20)
    known(engine, x)
    cut = result(1 << 20)
    cut.detach().untyped_storage().resize_(16)
    n = len(ordered)
    engine.pack(cut)
    assert len(ordered) == n


def test_the_first_part_of_a_storage_where_a_whole_one_was_saved_twice():
    class Parts(nn.Module):
        def forward(self, x, both):
            h = x * 1.0
            first = torch.unsafe_chunk(h, 2)[0] if both else h
            again = first.as_strided((N,), (1,), N if both else 0)
            return first.sin().sum() + again.cos().sum()

    assert_gradients_stay_right(Parts(), lambda both: ((1 + both) * N,))


def test_an_order_serves_the_thread_that_began_the_step(ordered):
    engine, x = engine_of(), result(N)
    known(engine, x)
    engine._replay.review()
    n, found = len(ordered), []
    thread = threading.Thread(target=lambda: found.append(engine.unpack(engine.pack(x))))
    thread.start()
    thread.join()
    assert torch.equal(found[0], x)
    assert len(ordered) == n


def test_without_the_guard_of_torch_all_go_the_general_way(ordered, monkeypatch):
    monkeypatch.setattr(tensor_check, "_GUARDS", None)
    engine, x = engine_of(), result(N)
    known(engine, x)
    assert type(engine.pack(x)) is PackedView
    assert not ordered


# ---------------------------------------------------------------- which modules


class Branches(nn.Module):
    """Two modules that save tensors of the same look; one of them runs in a step."""

    def __init__(self):
        super().__init__()
        self.left, self.right = nn.Tanh(), nn.Tanh()
        self.goes_left = True

    def forward(self, x):
        return (self.left if self.goes_left else self.right)(x * 2)


def test_the_rules_of_another_module_hold_at_the_same_place(ordered):
    model, x = Branches(), torch.randn(N, requires_grad=True)
    with cswap.install(model, **RAW, exclude=["right"]) as handle:
        for _ in range(STEPS):
            model(x).sum().backward()
        assert ordered
        n, swapped = len(ordered), handle.stats.swapped
        model.goes_left = False
        y = model(x)
        assert (len(ordered), handle.stats.swapped) == (n, swapped)
        assert handle.stats.kept_by_reason["excluded"] == 1
        y.sum().backward()


# ------------------------------------------------------------------- which steps


def gradients(model, x):
    return torch.autograd.grad(model(x).square().sum(), [x, *model.parameters()])


def perceptron():
    torch.manual_seed(0)
    layers = [nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32), nn.Sigmoid(), nn.Linear(32, 32)]
    return nn.Sequential(*layers), torch.randn(64, 32, requires_grad=True)


@pytest.mark.usefixtures("by_price")
@pytest.mark.parametrize("codec", ["raw", "zvc", "auto"])
def test_gradients_are_bit_equal_and_all_is_counted(ordered, codec):
    model, x = perceptron()
    wanted = gradients(model, x)
    with cswap.install(model, **RAW | {"codec": codec}) as handle:
        for _ in range(2 * STEPS):
            assert all(map(torch.equal, gradients(model, x), wanted))
            assert (handle.stats.device_bytes, handle.stats.host_bytes) == (0, 0)
        if codec != "auto":
            assert ordered
            n = handle.stats.by_codec[codec].count
            assert handle.stats.swapped == n == handle.stats.prefetch_misses
        assert_empty(handle.engine)


def test_two_forwards_before_a_backward(ordered):
    model, x = perceptron()
    wanted = gradients(model, x)
    with cswap.install(model, **RAW) as handle:
        for _ in range(STEPS):
            gradients(model, x)
        losses = [model(x).square().sum() for _ in range(2)]
        for loss in losses:
            found = torch.autograd.grad(loss, [x, *model.parameters()])
            assert all(map(torch.equal, found, wanted))
        del losses, loss
        assert_empty(handle.engine)
    assert ordered


def test_a_timeline_that_begins_within_a_step_shows_every_tensor(ordered):
    engine, x = engine_of(), result(N)
    known(engine, x)
    engine._replay.review()
    n = len(ordered)
    with engine.trace() as timeline:
        engine.unpack(engine.pack(x))
    assert len(ordered) == n
    names = [event["name"] for event in timeline.to_chrome()["traceEvents"]]
    assert "copy out" in names


def test_a_step_without_gradients_begins_none(ordered):
    model, x = perceptron()
    with cswap.install(model, **RAW) as handle:
        for _ in range(STEPS):
            gradients(model, x)
        order = handle.engine._state.order
        step = order.step
        with torch.no_grad():
            for _ in range(3):
                model(x)
        n = len(ordered)
        gradients(model, x)
        assert order.step == step + 1
        assert len(ordered) > n


def test_an_encoding_that_died_after_a_handle_is_given_back_at_the_next_tensor(
    ordered, monkeypatch
):
    monkeypatch.setattr(reclaim, "_collect_all", lambda: True)  # the thread does nothing
    engine, x = engine_of(), result(N)
    part = result(2 * N)[N:]  # a part of its storage has a handle

    def save():
        engine.begin_step()
        return [engine.pack(x), engine.pack(x + 1)], engine.pack(part)

    for _ in range(STEPS):
        packed, handled = save()
        engine.unpack(packed.pop())
    packed, handled = save()
    assert ordered[-2] is x
    engine.collect()  # of the step before
    deaths = engine._state.reclaimer.deaths
    del handled, packed[1]
    assert len(deaths) == 3  # of a token, and two encodings
    engine.unpack(packed[0])
    assert not deaths


class Sines(nn.Module):
    def forward(self, x):
        for _ in range(6):
            x = x.sin()
        return x


def with_weights(layer):
    """A net whose operators save weights, or small tensors, beside the large ones."""
    return nn.Sequential(*[each for _ in range(5) for each in (layer(), nn.ReLU())])


@pytest.mark.usefixtures("by_price")
@pytest.mark.parametrize(
    "net",
    [
        pytest.param(Sines(), id="none", marks=pytest.mark.slow),
        pytest.param(with_weights(lambda: nn.Linear(256, 256)), id="weights"),
        pytest.param(
            with_weights(lambda: nn.LayerNorm(256)), id="small tensors", marks=pytest.mark.slow
        ),
    ],
)
def test_the_advisor_learns_of_tensors_that_go_by_order(monkeypatch, net):
    # It is told when the next step begins, and when somebody asks for its notes.
    by_order, take = [0], InLineSlot.take
    uses, tell = [0], CodecSlot.tell

    def taken(self, *args):
        found = take(self, *args)
        by_order[0] += found is not None
        return found

    def told(self):
        uses[0] += bool(self.encoded_bytes)
        tell(self)

    monkeypatch.setattr(InLineSlot, "take", taken)
    monkeypatch.setattr(CodecSlot, "tell", told)
    x = (torch.randn(1024, 256) * (torch.rand(1024, 256) < 0.1)).requires_grad_()
    with cswap.swapping(min_bytes=2048, remat=False, slowdown=100) as engine:
        for _ in range(12):
            net(x).sum().backward()
        measured: Counter[str] = Counter()
        for found in engine.explain():
            for outcome in found.measured:
                measured[outcome.codec] += outcome.count
                assert outcome.device_s > 0
        by_codec = {codec: stats.count for codec, stats in engine.stats.by_codec.items()}
    assert measured == by_codec
    assert by_order[0] == uses[0] > sum(by_codec.values()) / 4


def test_an_order_waits_while_other_tensors_are_saved(monkeypatch):
    orders: list[InLineSlot] = []
    make, take = InLineSlot.__init__, InLineSlot.take
    weights, small = torch.nn.Parameter(torch.randn(64, 64)), torch.randn(4)
    engine = SwapEngine(SwapConfig(codec="raw", min_bytes=1024, remat=False))
    n_taken = [0]

    def made(self, *args):
        orders.append(self)
        make(self, *args)

    def taken(self, *args):
        n_taken[0] += 1
        return take(self, *args)

    monkeypatch.setattr(InLineSlot, "__init__", made)
    monkeypatch.setattr(InLineSlot, "take", taken)
    for _ in range(8):
        engine.begin_step()
        packed = [engine.pack(x) for x in (weights, small, torch.randn(64, 64) * 2.0)]
        engine.unpack(packed.pop())
        del packed
    assert len(orders) <= 2
    assert n_taken[0] >= 4
    engine.close()
