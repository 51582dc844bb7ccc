"""Saved tensors that are encoded in line at a known place: they have no handle."""

from __future__ import annotations

import gc
import time

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.codecs.registry import get_codec
from cswap.engine.saved import reclaim
from cswap.engine.saved.encoded import Encoded
from cswap.engine.saved.packed import PackedView
from tests.engine.engines import assert_empty
from tests.engine.looks import look_every

MODIFIED = "modified by an inplace operation"

GENERAL_WAY, BY_SLOTS = 1, 64
"""Values of `looks.EVERY`."""


pytestmark = pytest.mark.usefixtures("_same_numbers")


@pytest.fixture
def made(monkeypatch):
    """The number of tensors that went by a slot, in a list of one."""
    found, init = [0], Encoded.__init__

    def counted(self, *args, **named):
        found[0] += 1
        init(self, *args, **named)

    monkeypatch.setattr(Encoded, "__init__", counted)
    return found


def swapping(codec="raw", **options):
    return cswap.swapping(min_bytes=0, codec=codec, remat=False, **options)


def leaves():
    return [torch.randn(n, 64, requires_grad=True) for n in (512, 64)]


def steps(engine, loss, given, n=4, **options):
    """The gradients of the last of n steps."""
    found = ()
    for _ in range(n):
        engine.begin_step()
        found = torch.autograd.grad(loss(*given), given, **options)
    return found


def equal(found, wanted):
    return all(map(torch.equal, found, wanted))


def one(h, w):
    return (h.mul(2.0) @ w).sum()


def image(h, w):
    x = h.view(8, 16, 16, 16).contiguous(memory_format=torch.channels_last) * 1.0
    return functional.conv2d(x, w.view(16, 16, 4, 4)).square().sum()


LOSSES = {
    "plain": one,
    "view": lambda h, w: (h.mul(2.0).view(64, 512).t() @ w).square().sum(),
    "part": lambda h, w: (h.mul(2.0)[3:].exp() @ w).square().sum(),
    "gaps": lambda h, w: (h.mul(2.0)[:, ::2].exp() @ w[:32]).square().sum(),
    "channels_last": image,
    "relu": lambda h, w: (torch.relu(h @ w) @ w).square().sum(),
    "thrice": lambda h, w: sum((y @ w).square().sum() for y in 3 * (torch.relu(h),)),
    "indices": lambda h, w: h.topk(8).values.square().sum() + w.sum(),
    "complex": lambda h, w: (torch.complex(h, h).exp().conj() * 2).abs().sum() + w.sum(),
    "negated": lambda h, w: (torch.complex(h, h).exp().conj().imag * h).exp().sum() + w.sum(),
    "one leaf twice": lambda h, w: ((h @ w).exp() + (h @ w.t()).exp()).log().sum(),
}


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_gradients_are_bit_equal_and_nothing_stays(codec, name, made):
    given, loss = leaves(), LOSSES[name]
    wanted = torch.autograd.grad(loss(*given), given)
    with swapping(codec) as engine:
        assert equal(steps(engine, loss, given), wanted)
        assert engine.stats.fallbacks == 0
        assert_empty(engine)
    assert made[0] > 0 or name in ("gaps", "indices", "one leaf twice")


@pytest.mark.parametrize("codec", ["raw", "zvc", "int8"])
def test_statistics_and_values_are_those_of_the_whole_way(codec, monkeypatch, made):
    found = []
    for n in (GENERAL_WAY, BY_SLOTS):
        look_every(monkeypatch, n)
        torch.manual_seed(0)
        given = leaves()
        with swapping(codec) as engine:
            gradients = steps(engine, LOSSES["relu"], given, n=6)
            s = engine.stats
            c = s.by_codec[codec]
            counts = (s.packed, s.swapped, s.deduplicated, s.prefetch_misses, s.peak_saved_bytes)
            found.append((*counts, s.peak_host_bytes, c.count, c.raw, c.encoded, gradients))
            assert c.encode_s > 0
            assert c.decode_s > 0
    assert found[0][:-1] == found[1][:-1]
    assert equal(found[0][-1], found[1][-1])
    assert made[0] > 0


@pytest.mark.parametrize("of", ["tensor", "view"])
def test_a_change_in_place_raises_as_without_hooks(of, made):
    x, w = leaves()
    with swapping() as engine:
        for modify in (False, False, True):
            engine.begin_step()
            y = x * 2.0
            loss = (y @ w).sum()
            if not modify:
                loss.backward()
                continue
            with torch.no_grad():
                {"tensor": y, "view": y.detach()[3:]}[of].mul_(2)
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()
        del loss
        assert_empty(engine)
    assert made[0] > 0


def test_the_tensor_is_gone_between_forward_and_backward(made):
    x, w = leaves()
    with swapping("zvc") as engine:
        for _ in range(3):
            engine.begin_step()
            y = torch.relu(x) * 0.0
            address = torch.multiprocessing.reductions.StorageWeakRef(y.untyped_storage())
            loss = (y @ w).sum()
            del y
            assert address.expired()
            assert engine.stats.device_bytes == 0
            loss.backward()
    assert made[0] > 0


def test_a_graph_may_be_asked_twice(made):
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    with swapping("zvc") as engine:
        steps(engine, one, given)
        engine.begin_step()
        loss = one(*given)
        for _ in range(2):
            assert equal(torch.autograd.grad(loss, given, retain_graph=True), wanted)
        del loss
        assert_empty(engine)
    assert made[0] > 0


def test_memory_of_a_dropped_graph_comes_back_though_nobody_calls_the_engine(made):
    given = leaves()
    with swapping() as engine:
        steps(engine, one, given)
        engine.begin_step()
        loss = one(*given)
        assert engine.stats.host_bytes > 0
        del loss
        gc.collect()
        deadline = time.monotonic() + 20
        while engine.counters._host_bytes:
            assert time.monotonic() < deadline
            time.sleep(reclaim.EVERY_S / 4)
    assert made[0] > 0


def test_a_release_that_fails_stops_no_other(made, monkeypatch):
    def fail(_death):
        raise RuntimeError("of the test")

    look_every(monkeypatch, 4)
    given = leaves()
    with swapping() as failing:
        steps(failing, one, given, n=5)  # the fifth one is a look
        failing.begin_step()
        loss = one(*given)
        monkeypatch.setattr(failing._state.lanes._made()[0].host, "put_back", fail)
    with swapping() as engine:
        steps(engine, one, given)
        engine.begin_step()
        other = one(*given)
        assert engine.stats.host_bytes > 0
        del loss, other
        gc.collect()
        deadline = time.monotonic() + 20
        while engine.counters._host_bytes or not failing.counters.fallbacks["release"]:
            assert time.monotonic() < deadline
            time.sleep(reclaim.EVERY_S / 4)
    assert made[0] > 0


def test_a_codec_that_fails_degrades_to_the_whole_way(monkeypatch, made):
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    codec = get_codec("zvc")

    def fail(*_args, **_options):
        raise ValueError("out of order")

    with swapping("zvc") as engine:
        steps(engine, one, given)
        monkeypatch.setattr(type(codec), "encode_flat", fail)
        before = made[0]
        assert equal(steps(engine, one, given, n=1), wanted)
        assert engine.stats.fallbacks_by_reason == {"zvc:encode": 2}
        assert made[0] == before > 0
        assert_empty(engine)


def test_without_room_on_the_host_the_tensor_stays(made):
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    with swapping(host_limit=sum(x.nbytes for x in given)) as engine:
        steps(engine, one, given)
        host, before = engine._state.lanes.of(given[0].device).host, made[0]
        loans = [host.take(x.nbytes) for x in given]
        assert equal(steps(engine, one, given, n=1), wanted)
        assert engine.stats.kept_by_reason == {"host_limit": 2}
        assert made[0] == before > 0
        for loan in loans:
            host.give_back(loan.buffer)
        assert_empty(engine)


@pytest.mark.parametrize("where", ["encode_flat", "decode_flat"])
def test_an_interrupt_leaves_nothing_behind(where, monkeypatch, made):
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    codec, times = get_codec("zvc"), [1]
    run = getattr(type(codec), where)

    def interrupted(*args, **options):
        if times:
            times.pop()
            raise KeyboardInterrupt
        return run(*args, **options)

    with swapping("zvc") as engine:
        steps(engine, one, given)
        with monkeypatch.context() as patch:
            patch.setattr(type(codec), where, interrupted)
            with pytest.raises(KeyboardInterrupt):
                steps(engine, one, given, n=1)
        assert_empty(engine)
        assert equal(steps(engine, one, given), wanted)
        assert_empty(engine)
    assert made[0] > 3


def test_a_leaf_that_others_begin_to_save_is_pinned_at_the_next_look(monkeypatch):
    look_every(monkeypatch, 4)
    mask = (torch.rand(512, 64) < 0.5).float()
    x = torch.randn(512, 64, requires_grad=True)
    with swapping("zvc") as engine:
        for layers in (1, 1, 2, 2, 2, 2):  # a second layer begins to use it
            engine.begin_step()
            y = x
            for _ in range(layers):
                y = (y * mask).exp()
            y.sum().backward()
        assert engine.stats.kept_by_reason["saved_again"] >= 2
        assert_empty(engine)


def test_an_encoding_is_the_input_of_a_chain(monkeypatch, made):
    monkeypatch.setattr("cswap.engine.trials._timed", lambda *_: 1e-6)

    def loss(h, w):
        return (functional.gelu(h * 2.0) @ w).sum()

    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    with cswap.swapping(min_bytes=0, codec="zvc") as engine:
        assert equal(steps(engine, loss, given), wanted)
        assert engine.stats.by_codec["remat"].count == 4
        assert_empty(engine)
    assert made[0] > 0


def test_the_guard_can_forbid_the_codec_of_a_known_place(made):
    given = leaves()
    with swapping("int8") as engine:
        steps(engine, one, given)
        before = made[0]
        for kind in {e.site.kind for e in engine.explain()}:
            engine.advisor.milder.forbid(kind, "int8")
        steps(engine, one, given, n=1)
        assert made[0] == before > 0


@pytest.mark.usefixtures("by_price")
def test_training_with_the_default_codec_is_bit_equal():
    def trained(context):
        torch.manual_seed(0)
        net = nn.Sequential(
            nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Dropout(0.5), nn.Flatten(),
            nn.Linear(8 * 36, 10),
        )  # fmt: skip
        optimizer = torch.optim.SGD(net.parameters(), 0.1)
        with context:
            for _ in range(12):
                optimizer.zero_grad()
                net(torch.randn(16, 3, 8, 8)).logsumexp(1).sum().backward()
                optimizer.step()
        return [p.detach() for p in net.parameters()]

    wanted = trained(torch.enable_grad())
    assert equal(trained(cswap.swapping(min_bytes=0)), wanted)


def test_from_the_second_step_on_there_is_no_handle():
    with swapping() as engine:
        kinds = []
        for _ in range(3):
            engine.begin_step()
            packed = engine.pack(torch.randn(8) * 2.0)
            kinds.append(type(packed))
            engine.unpack(packed)
            del packed
        assert kinds == [PackedView, Encoded, Encoded]
        assert_empty(engine)


def test_memory_that_does_not_begin_at_a_word(made):
    # NumPy's arrays of a file begin anywhere.
    whole = torch.empty(64 * 64 * 4 + 4, dtype=torch.uint8)
    odd = torch.frombuffer(whole.numpy(), dtype=torch.float32, offset=4).view(64, 64)
    odd.copy_(torch.randn(64, 64).relu())
    assert odd.data_ptr() % 8 == 4
    w = torch.randn(64, 64, requires_grad=True)
    wanted = torch.autograd.grad((odd @ w).sum(), w)
    with swapping("zvc") as engine:
        assert equal(steps(engine, lambda v: (odd @ v).sum(), [w]), wanted)
        assert made[0] > 0
        assert engine.stats.fallbacks == 0


@pytest.mark.parametrize("before", [6, 7])  # steps: by order, where the advisor does not look back
def test_an_impossible_size_takes_the_whole_way(monkeypatch, before):
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    with swapping("zvc") as engine:
        steps(engine, one, given, n=before)
        codec = type(get_codec("zvc"))
        encode, calls = codec.encode_flat, []

        def too_large(self, x, out, **named):
            calls.append(x)
            size = encode(self, x, out, **named)
            return out.numel() + 1 if len(calls) == 1 else size

        monkeypatch.setattr(codec, "encode_flat", too_large)
        assert equal(steps(engine, one, given, n=2), wanted)
        assert len(calls) > 1
        assert engine.stats.fallbacks == 0
        assert_empty(engine)


def test_another_default_device_changes_nothing():
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    with swapping("zvc") as engine:
        steps(engine, one, given)
        engine.begin_step()
        with torch.device("meta"):
            packed = engine.pack(given[0])
            back = engine.unpack(packed)
        assert torch.equal(back, given[0])
        assert equal(steps(engine, one, given), wanted)


def test_an_engine_that_is_made_while_the_thread_looks_does_not_end_it(monkeypatch):
    class Growing:
        looks = 0

        def __iter__(self):
            self.looks += 1
            if self.looks == 1:
                raise RuntimeError("Set changed size during iteration")
            return iter(())

    growing = Growing()
    monkeypatch.setattr(reclaim, "_reclaimers", growing)
    assert not reclaim._collect_all()
    assert growing.looks == 2
