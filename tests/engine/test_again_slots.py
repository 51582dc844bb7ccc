"""Saved tensors that are computed again at a known place: they have no handle."""

from __future__ import annotations

import gc
from collections import deque
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import cswap
from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.hooks import Swapping
from cswap.remat.record import Remat
from tests.engine.engines import assert_empty, engine_over_a_link
from tests.engine.looks import look_every

if TYPE_CHECKING:
    from cswap.engine.order.chooser import Took

MODIFIED = "modified by an inplace operation"


pytestmark = pytest.mark.usefixtures("_chains_take_no_time", "by_price")


def swapping():
    return cswap.swapping(min_bytes=0)


def leaves():
    return [torch.randn(n, 64, requires_grad=True) for n in (512, 64)]


def one(h, w):
    """One tensor that can be computed again: gelu(h)."""
    return (functional.gelu(h) @ w).sum()


def gradients(engine, loss, leaves, **options):
    engine.begin_step()
    return torch.autograd.grad(loss(*leaves), leaves, **options)


def equal(found, wanted):
    return all(map(torch.equal, found, wanted))


@pytest.mark.parametrize(
    ("loss", "n_again"),
    [
        (one, 1),
        (lambda h, w: (functional.layer_norm(h, (64,)) @ w).sum(), 1),
        (lambda h, w: (functional.gelu(h).view(8, 64, 64) @ w).sum(), 1),
        (lambda h, w: (functional.gelu(h).t().reshape(64, 512).t() @ w).sum(), 1),
        (lambda h, w: (functional.softplus(h)[2:].t().mm(h[2:]) @ w).sum(), 1),
        (lambda h, w: (functional.silu(h) * h).mm(w).sum(), 2),
    ],
    ids=["gelu", "layer_norm", "view", "copy", "part", "gated"],
)
def test_gradients_are_bit_equal(loss, n_again, taken):
    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    with swapping() as engine:
        for _ in range(4):
            assert equal(gradients(engine, loss, given), wanted)
        assert taken == 3 * n_again * [True]
        stats = engine.stats
        assert stats.by_codec["remat"].count >= 4
        assert stats.fallbacks == 0
        assert_empty(engine)


def test_nothing_holds_the_memory_between_forward_and_backward(taken):
    h, w = leaves()
    with swapping() as engine:
        for _ in range(3):
            engine.begin_step()
            y = functional.gelu(h)
            storage = StorageWeakRef(y.untyped_storage())
            loss = (y @ w).sum()
            del y
            assert storage.expired()
            loss.backward()
    assert taken == [True, True]


def test_statistics_are_those_of_the_whole_way(monkeypatch, taken):
    counts = []
    for steps in (1, 64):
        look_every(monkeypatch, steps)
        given = leaves()
        with swapping() as engine:
            for _ in range(3):
                gradients(engine, one, given)
            s = engine.stats
            remat = s.by_codec["remat"]
            counts.append((s.packed, s.swapped, s.prefetch_misses, remat.count, remat.raw))
    assert counts[0] == counts[1]
    assert taken == [True, True]


@pytest.mark.parametrize("of", ["tensor", "input", "view"])
def test_a_change_in_place_raises_as_without_hooks(of, taken):
    x, w = leaves()
    with swapping() as engine:
        for modify in (False, False, True):
            engine.begin_step()
            h = x * 1.0
            y = functional.gelu(h)
            loss = (y @ w).sum()
            if not modify:
                del y, h  # or they would stay: nothing is gained while the program holds them
                loss.backward()
                continue
            with torch.no_grad():
                {"tensor": y, "input": h, "view": y.detach()[3:]}[of].mul_(2)
            with pytest.raises(RuntimeError, match=MODIFIED):
                loss.backward()
    assert taken == [True, True]


def twice(h, w):
    """gelu(h) is saved by two operators."""
    y = functional.gelu(h)
    return (y @ w).sum() + (y @ w.t()).square().sum()


def thrice(h, w):
    """Saved by three, as two views."""
    y = functional.silu(h)
    return sum((part @ w).square().sum() for part in (y, y.view(2, -1, 64), y))


def in_parts(h, w):
    """Saved whole, and a part of it that begins later."""
    y = functional.gelu(h)
    return (y @ w).sum() + (y[5:] @ w.t()).square().sum()


def rectified(h, w):
    """relu saves its own result."""
    return (torch.relu(functional.layer_norm(h, (64,))) @ w).square().sum()


def rectified_in_place(h, w):
    return (torch.relu_(functional.layer_norm(h, (64,))) @ w).square().sum()


def apart(h, w):
    """Four tensors, each saved twice; all are asked for once before any is asked for again."""
    ys = [functional.gelu(h * n) for n in range(1, 5)]
    first = [(y @ w).sum() for y in ys]
    second = [(y @ w.t()).square().sum() for y in reversed(ys)]
    return sum(first) + sum(second)


@pytest.mark.parametrize(
    ("loss", "shared"),  # the weight is saved by each product, too
    [(twice, 2), (thrice, 4), (in_parts, 2), (rectified, 1), (rectified_in_place, 1)],
    ids=["twice", "thrice", "in_parts", "own_result", "in_place"],
)
def test_a_tensor_that_is_saved_again_is_computed_once(loss, shared, taken, computed):
    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    with swapping() as engine:
        gradients(engine, loss, given)
        for n in range(1, 4):
            del computed[:]
            assert equal(gradients(engine, loss, given), wanted)
            assert len(computed) == 1
            assert engine.stats.deduplicated == shared * (n + 1)
        assert_empty(engine)
    assert taken == 3 * [True]


def test_few_results_wait_for_others(taken):
    given = leaves()
    wanted = torch.autograd.grad(apart(*given), given)
    with swapping() as engine:
        results, most = engine._state.results, []
        asked = results.asked

        def noted(*args):
            asked(*args)
            most.append(results.nbytes)

        results.asked = noted
        for _ in range(4):
            assert equal(gradients(engine, apart, given), wanted)
            assert results.nbytes == 0
            (lane,) = engine._state.lanes._made()
            if lane.ready_bytes != 2 * given[0].nbytes:
                lane.ready_bytes = 2 * given[0].nbytes
                most.clear()
        assert_empty(engine)
    assert max(most) == 2 * given[0].nbytes
    assert taken == 12 * [True]


def test_a_tensor_that_changes_between_two_saves(taken):
    def changed(h, w, change):
        y = functional.gelu(h)
        first = (y @ w).sum()
        if change:
            with torch.no_grad():
                y.mul_(2)
        return first + (y @ w.t()).square().sum()

    given = leaves()
    with swapping() as engine:
        for change in (False, False, True, False):
            engine.begin_step()
            total = changed(given[0], given[1], change)
            if change:
                with pytest.raises(RuntimeError, match=MODIFIED):
                    total.backward()
            else:
                wanted = torch.autograd.grad(twice(*given), given)
                assert equal(torch.autograd.grad(total, given), wanted)
        del total
        assert_empty(engine)


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_a_backward_that_raises_between_two_users(error, taken):
    h, w = leaves()

    def fails(_gradient):
        raise error

    with swapping() as engine:
        gradients(engine, twice, (h, w))
        wanted = gradients(engine, twice, (h, w))
        engine.begin_step()
        y = functional.gelu(h)
        first = y @ w
        loss = first.sum() + (y @ w.t()).square().sum()
        first.register_hook(fails)
        with pytest.raises(error):
            loss.backward()
        del y, first, loss
        gc.collect()
        assert_empty(engine)
        h.grad = w.grad = None
        assert equal(gradients(engine, twice, (h, w)), wanted)
        assert_empty(engine)
    assert taken == 3 * [True]


def test_a_look_at_a_node_keeps_no_result(taken):
    h, w = leaves()
    with swapping() as engine:
        gradients(engine, twice, (h, w))
        engine.begin_step()
        y = functional.gelu(h)
        product = y @ w
        loss = product.sum() + (y @ w.t()).square().sum()
        assert torch.equal(product.grad_fn._saved_self, y)
        assert engine._state.results.nbytes == 0
        loss.backward()
    assert taken == [True]


def test_one_of_two_users_is_never_asked(taken):
    given = leaves()
    with swapping() as engine:
        for _ in range(3):
            engine.begin_step()
            y = functional.gelu(given[0])
            used, unused = (y @ given[1]).sum(), (y @ given[1]).square().sum()
            del y
            used.backward()
            assert engine._state.results.nbytes == 0
        del used, unused
        assert_empty(engine)
    assert taken == [True, True]


def test_a_second_save_that_begins_later_is_right_and_is_seen_after_some_steps(monkeypatch, taken):
    look_every(monkeypatch, 4)
    given = leaves()
    wanted = {loss: torch.autograd.grad(loss(*given), given) for loss in (one, twice)}
    with swapping() as engine:
        for loss in [one, one, *10 * [twice]]:
            assert equal(gradients(engine, loss, given), wanted[loss])
        assert engine.stats.swapped == 2 + 2 * 2 + 8  # of gelu(h), saved twice or shared
    # Until the fourth step the second save has a slot of its own.
    assert taken == 10 * [True]


def complex_pairs(y):
    return torch.view_as_complex(y.view(-1, 32, 2))


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (lambda y: y.square().sum(), lambda y: complex_pairs(y).square().real.sum()),
        (
            lambda y: (c := complex_pairs(y) * 1j).mul(c.cos()).square().abs().sum(),
            lambda y: torch.view_as_real((c := complex_pairs(y) * 1j) * c.cos()).square().sum(),
        ),
    ],
    ids=["as complex numbers", "as real numbers"],
)
def test_a_view_of_another_dtype_at_a_known_place_is_not_computed_again(before, after):
    h, _ = leaves()
    with swapping() as engine:
        for loss in [before] * 3 + [after] * 4:
            engine.begin_step()
            (found,) = torch.autograd.grad(loss(functional.gelu(h)), h)
            with torch.autograd.graph.saved_tensors_hooks(lambda x: x, lambda x: x):
                (wanted,) = torch.autograd.grad(loss(functional.gelu(h)), h)
            assert torch.equal(found, wanted)


def test_a_second_save_after_a_write_gets_the_new_values():
    # The first user is never asked, so nobody else would see that the tensor was written.
    h, w = leaves()

    def loss(*, writes):
        y = functional.gelu(h)
        unused = y @ w
        if writes:
            with torch.no_grad():
                y.mul_(2)
        return (y @ w.t()).square().sum(), unused

    with swapping() as engine:
        for writes in (False, False, False, True):
            engine.begin_step()
            found, unused = loss(writes=writes)
            (gradient,) = torch.autograd.grad(found, w)
            del unused
    (wanted,) = torch.autograd.grad(loss(writes=True)[0], w)
    assert torch.equal(gradient, wanted)


def test_an_input_without_a_handle_is_computed_for_its_user(monkeypatch, taken):
    # As above, but the tensor was used by no other when its place became known.
    def also(h, w):
        y = functional.gelu(h)
        return (y @ w).sum() + (functional.silu(y) @ w).square().sum()

    given = leaves()
    wanted = {loss: torch.autograd.grad(loss(*given), given) for loss in (one, also)}
    with swapping() as engine:
        for loss in (one, one, also, also, also, one):
            assert equal(gradients(engine, loss, given), wanted[loss])
    assert taken[:2] == [True, True]


def test_another_tensor_at_the_place_goes_the_whole_way(taken):
    def loss(kind):
        h, w = given
        return (kind(h) @ w).sum()

    kinds = 2 * [functional.gelu] + [functional.silu, torch.sin, lambda x: x @ x.t() @ x]
    given = leaves()
    wanted = [torch.autograd.grad(loss(kind), given) for kind in kinds]
    with swapping() as engine:
        for kind, expected in zip(kinds, wanted, strict=True):
            engine.begin_step()
            assert equal(torch.autograd.grad(loss(kind), given), expected)
    assert taken[0]
    assert not all(taken)


def test_two_forwards_before_their_backwards_and_a_retained_graph(taken):
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    with swapping() as engine:
        gradients(engine, one, given)
        for _ in range(2):
            losses = []
            for _ in range(2):
                engine.begin_step()
                losses.append(one(*given))
            for loss in losses:
                for retain in (True, False):
                    assert equal(torch.autograd.grad(loss, given, retain_graph=retain), wanted)
    assert taken == [True, False, True, True]  # a second call is tried by itself


def test_second_derivatives(taken):
    def second(h, w):
        (first,) = torch.autograd.grad(
            (functional.silu(h) @ w).square().sum(), w, create_graph=True
        )
        return torch.autograd.grad(first.square().sum(), (h, w))

    given = leaves()
    wanted = second(*given)
    with swapping() as engine:
        for _ in range(4):
            engine.begin_step()
            assert equal(second(*given), wanted)
        del wanted
        gc.collect()
        assert_empty(engine)
    assert True in taken


def test_a_graph_that_is_dropped_leaves_nothing(taken):
    given = leaves()
    with swapping() as engine:
        for _ in range(2):
            for _ in range(3):
                engine.begin_step()
                one(*given)
            gradients(engine, one, given)
            assert_empty(engine)
    assert taken[-4:] == 4 * [True]


def test_its_time_in_the_hooks_is_told(monkeypatch, taken):
    given = leaves()
    took: Took = deque()
    with swapping() as engine:
        gradients(engine, one, given)
        engine._state.took = took
        gradients(engine, one, given)
        ((position, nbytes, seconds),) = took
        assert nbytes == given[0].nbytes
        assert 0 < seconds < 60
        assert position >= 0
    assert taken == [True]


@pytest.mark.parametrize("handles", [False, True])
def test_the_time_of_an_input_is_the_inputs_own(monkeypatch, handles):
    # silu(gelu(h)), from gelu(h), which is computed again, too: that takes a second here.
    now, run = [0.0], Remat.run

    def slow(self, inputs, exact):
        now[0] += 1.0 if self.formula.operator == "gelu" else 0.1
        return run(self, inputs, exact)

    monkeypatch.setattr(Remat, "run", slow)
    for module in ("packer", "replay.replay", "unpacker", "recomputer"):
        name = "_clock" if module == "recomputer" else "_now"
        monkeypatch.setattr(f"cswap.engine.{module}.{name}", lambda: now[0])
    given = leaves()
    took: Took = deque()
    with swapping() as engine:
        for step in range(3):
            engine._state.took = took
            if handles and step == 2:
                engine.observer.seen = []
            took.clear()
            gradients(engine, lambda h, w: (functional.silu(functional.gelu(h)) @ w).sum(), given)
            engine.collect()
    assert sorted(seconds for _, _, seconds in took) == pytest.approx([0.1, 1.0])


def test_the_guard_sees_every_tensor_in_its_steps(taken):
    given = leaves()
    with swapping() as engine:
        for _ in range(2):
            gradients(engine, one, given)
        engine.observer.seen = []
        gradients(engine, one, given)
        assert any(saved.sizes == given[0].shape for saved in engine.observer.seen)
    assert taken == [True]


@pytest.mark.parametrize("over_a_link", [False, True])
@pytest.mark.parametrize("codec", ["zvc", "raw"])
def test_inputs_that_are_swapped_come_back_for_it(codec, over_a_link, taken):
    def loss(x, w):
        return (functional.gelu(x * 2.0) @ w).sum()

    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    options: dict[str, Any] = {"min_bytes": 0, "codec": codec}
    made = engine_over_a_link(0, **options) if over_a_link else SwapEngine(SwapConfig(**options))
    with Swapping(made) as engine:
        for _ in range(4):
            engine.begin_step()
            found = loss(*given)
            engine.synchronize()  # over a link: else the tensors are wanted before they have left
            assert equal(torch.autograd.grad(found, given), wanted)
        stats = engine.stats
        assert stats.by_codec["remat"].count == 4
        assert stats.by_codec[codec].count > 0
    assert taken == [True, True, True]


@pytest.mark.parametrize("whole_training", [True, False])
def test_steps_that_nobody_announces_are_known_as_well(whole_training, taken):
    given = leaves()
    wanted = torch.autograd.grad(one(*given), given)
    context = swapping()
    if whole_training:
        with context as engine:
            for _ in range(4):
                assert equal(torch.autograd.grad(one(*given), given), wanted)
    else:
        for _ in range(4):
            with context as engine:
                loss = one(*given)
            assert equal(torch.autograd.grad(loss, given), wanted)
    assert taken == 3 * [True]
    assert engine.stats.packed == 4 * 3


VIEWS = {
    "conj": (torch.complex64, lambda y, w: (y.conj() @ w).real),
    "mH": (torch.complex64, lambda y, w: (y.mH @ (y @ w)).real),
    "neg": (torch.float32, lambda y, w: torch._neg_view(y) @ w),
    "view_as_real": (torch.complex64, lambda y, w: torch.view_as_real(y).square()),
    "imag": (torch.complex64, lambda y, w: y.imag.square() @ w.real),
    "view_as_complex": (
        torch.float32,
        lambda y, w: torch.view_as_complex(y.view(-1, 32, 2)).square().real,
    ),
}


@pytest.mark.parametrize("name", VIEWS)
def test_views_of_other_numbers_than_those_in_memory(name):
    dtype, view = VIEWS[name]
    h, w = (torch.randn(n, 64, dtype=dtype, requires_grad=True) for n in (512, 64))

    def loss(h, w):
        # The first one makes the chain known as right.
        return sum((y @ w).real.sum() + view(y, w).sum() for y in (h * h.cos(), h * h.sin()))

    wanted = torch.autograd.grad(loss(h, w), (h, w))
    with swapping() as engine:
        for _ in range(4):
            assert equal(gradients(engine, loss, (h, w)), wanted)
