"""Saved tensors whose values backward does not read: nothing is held of them."""

from __future__ import annotations

import gc
import random
import time
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F  # noqa: N812

import cswap
from cswap.engine import unread_places
from cswap.engine.saved.unread import Unread
from cswap.errors import ValuesGoneError
from cswap.remat.reads import CAN_READ
from cswap.remat.record import same_bits
from cswap.remat.unread import UNREAD
from tests.engine.engines import assert_empty

pytestmark = [
    pytest.mark.usefixtures("_same_numbers"),
    pytest.mark.skipif(not CAN_READ, reason="torch does not show what nodes have saved"),
]

STEPS = 4


@pytest.fixture
def let_go(monkeypatch):
    """Sizes of the tensors that are let go."""
    found, of_one = [], Unread.let_go

    def noted(self):
        found.append(tuple(self.place.recipe.sizes))
        of_one(self)

    monkeypatch.setattr(Unread, "let_go", noted)
    return found


@pytest.fixture
def given_up(monkeypatch):
    """Sizes of the tensors that stay, though they were expected to be unread."""
    found, of_one = [], unread_places.UnreadPlaces._give_up

    def noted(self, one, packed):
        found.append(tuple(packed.place.recipe.sizes))
        of_one(self, one, packed)

    monkeypatch.setattr(unread_places.UnreadPlaces, "_give_up", noted)
    return found


def swapping(**options):
    return cswap.swapping(min_bytes=0, **options)


def images():
    return torch.randn(2, 3, 8, 8, requires_grad=True)


def pooled(x, saver=torch.sin):
    """One unread tensor, x * 2, whose pool another operator saves."""
    return saver(F.max_pool2d(x * 2, 2)).sum()


def grads(engine, loss, *leaves, **options):
    engine.begin_step()
    return torch.autograd.grad(loss(*leaves), leaves, **options)


def plain(loss, *leaves):
    """Gradients without the engine's hooks."""
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
        return torch.autograd.grad(loss(*leaves), leaves)


def saved_by(pool) -> torch.Tensor:
    """The tensor that a pool's node has saved, as a user looks at it."""
    node: Any = pool.grad_fn
    return node._saved_self  # type: ignore[no-any-return]


def equal(found, wanted):
    return all(map(same_bits, found, wanted))


def test_nothing_is_held_of_them(let_go):
    x = images()
    wanted = torch.autograd.grad(pooled(x), x)
    with swapping() as engine:
        for step in range(STEPS):
            engine.begin_step()
            h = x * 2
            storage = StorageWeakRef(h.untyped_storage())
            y = F.max_pool2d(h, 2)
            del h
            assert not storage.expired()
            loss = torch.sin(y).sum()
            assert step == 0 or storage.expired()
            assert equal(torch.autograd.grad(loss, x), wanted)
        assert let_go == (STEPS - 1) * [(2, 3, 8, 8)]
        stats = engine.stats
        assert stats.by_codec["unread"].count == STEPS - 1
        assert stats.by_codec["unread"].raw == (STEPS - 1) * 4 * x.numel()
        assert stats.fallbacks == 0
        assert "unproven" not in stats.kept_by_reason
        assert_empty(engine)
        assert any(found.codec == "unread" for found in engine.explain())


def test_each_saved_tensor_is_counted_once():
    x = images()
    counts = []
    for remat in (True, False):
        with swapping(remat=remat) as engine:
            for _ in range(STEPS):
                grads(engine, pooled, x)
            counts.append(engine.stats.packed)
    assert counts[0] == counts[1]


@pytest.mark.parametrize("options", [{"remat": False}, {"verify": True}, {"policy": "raw"}])
def test_the_options_may_say_that_all_is_held(options, let_go):
    x = images()
    with swapping(**options) as engine:
        for _ in range(STEPS):
            grads(engine, pooled, x)
    assert let_go == []


def test_all_is_held_where_torch_does_not_show_what_nodes_have_saved(let_go, monkeypatch):
    monkeypatch.setattr("cswap.engine.recomputer.CAN_READ", False)
    x = images()
    with swapping() as engine:
        for _ in range(STEPS):
            grads(engine, pooled, x)
    assert let_go == []


@pytest.mark.parametrize("fit", [None, "min", "1GiB"])
def test_a_goal_plans_without_them(let_go, fit):
    x, model = images(), torch.nn.Sequential(torch.nn.Conv2d(3, 3, 3), torch.nn.MaxPool2d(2))
    model.append(torch.nn.GELU())
    plain = torch.autograd.grad(model(x).square().sum(), [*model.parameters()])
    handle: Any
    with cswap.install(model, min_bytes=0, fit=fit) as handle:
        before = 0
        for n in range(12):
            loss = model(x).square().sum()
            assert all(map(torch.equal, torch.autograd.grad(loss, [*model.parameters()]), plain))
            count = handle.stats.by_codec["unread"].count if n else 0
            assert count == before + (n > 0)  # as soon as it is known, and in all phases
            before = count
            while handle.goal.phase == "planning" and not handle._fit._planning.done:
                time.sleep(0.001)
        assert handle.goal.phase == "obeying"
        assert not handle._fit._chooser.step.unknown_bytes
        (explained,) = (one for one in handle.engine.explain() if one.codec == "unread")
        assert explained.nbytes == 2 * 3 * 6 * 6 * 4
    assert let_go


def test_a_name_does_not_depend_on_what_is_unread(let_go):
    class Pooled(torch.nn.Module):
        def forward(self, x):
            return pooled(x)

    model, x = Pooled(), images()
    model.register_buffer("on_a_cpu", torch.zeros(1))
    handle: Any
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(12):
            model(x).backward()
            while handle.goal.phase == "planning" and not handle._fit._planning.done:
                time.sleep(0.001)
        names = [key for key in handle._fit._plan.decided if key.dtype is torch.float32]
    assert let_go
    assert [name.nth for name in names] == [1]  # 0 is x * 2


def test_one_that_was_not_proven_is_not_tried_again_by_a_goal(given_up):
    """A loss: no later tensor leads to its node. Each plan begins with new recipes."""

    class Loss(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.target = torch.nn.Linear(8, 16), torch.randint(16, (64,))

        def forward(self, x):
            return F.cross_entropy(self.layer(x.relu()), self.target)

    model, x = Loss(), torch.randn(64, 8, requires_grad=True)
    plain = torch.autograd.grad(model(x), [x, *model.parameters()])
    handle: Any
    with cswap.install(model, min_bytes=0) as handle:
        for _ in range(40):
            found = torch.autograd.grad(model(x), [x, *model.parameters()])
            assert all(map(torch.equal, found, plain))
            while handle.goal.phase == "planning" and not handle._fit._planning.done:
                time.sleep(0.001)
        assert handle.goal.phase == "obeying"
        assert handle._fit._drifts == 0
    assert len(given_up) == 1


def test_a_selector_of_operators_holds(let_go):
    x = images()
    with swapping(exclude=["op:*pool*"]) as engine:
        for _ in range(STEPS):
            grads(engine, pooled, x)
    assert let_go == []


def test_a_change_in_place_raises_as_without_hooks(let_go):
    x = images()
    with swapping() as engine:
        for modify in (False, False, True):
            engine.begin_step()
            h = x * 2
            loss = torch.sin(F.max_pool2d(h, 2)).sum()
            if modify:
                h.detach().mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    loss.backward()
            else:
                loss.backward()
    assert len(let_go) == 2


def test_a_change_before_the_node_is_found_raises(let_go):
    x = images()
    with swapping() as engine:
        for modify in (False, False, True):
            engine.begin_step()
            h = x * 2
            y = F.max_pool2d(h, 2)
            if modify:
                h.detach().mul_(2)
                with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                    torch.sin(y).sum().backward()
            else:
                torch.sin(y).sum().backward()


def test_who_looks_at_the_values_is_told(let_go):
    x = images()
    wanted = torch.autograd.grad(pooled(x), x)
    with swapping() as engine:
        for _ in range(2):
            grads(engine, pooled, x)
        engine.begin_step()
        y = F.max_pool2d(x * 2, 2)
        assert same_bits(saved_by(y), x.detach() * 2)  # it may be asked for now
    with swapping() as engine:
        for _ in range(2):
            grads(engine, pooled, x)
        engine.begin_step()
        y = F.max_pool2d(x * 2, 2)
        loss = torch.sin(y).sum()
        with pytest.raises(ValuesGoneError, match=r"\[2, 3, 8, 8\].*remat=False"):
            saved_by(y)
        seen = []
        node: Any = y.grad_fn
        node.register_prehook(lambda _: seen.append(saved_by(y).isnan().all()))
        assert equal(torch.autograd.grad(loss, x), wanted)
        assert seen == [True]
    assert let_go


@pytest.mark.parametrize("times", [2, 3])
def test_a_graph_may_be_kept(times, let_go):
    x = images()
    wanted = torch.autograd.grad(pooled(x), x)
    with swapping() as engine:
        for _ in range(3):
            engine.begin_step()
            loss = pooled(x)
            for _ in range(times):
                assert equal(torch.autograd.grad(loss, x, retain_graph=True), wanted)
    assert len(let_go) == 2


@pytest.mark.parametrize("inside", [True, False])
def test_gradients_of_gradients(inside, let_go):
    x = images()

    def second(x):
        (g,) = torch.autograd.grad(pooled(x, torch.tanh), x, create_graph=True)
        (h,) = torch.autograd.grad(g.square().sum(), x, create_graph=True)
        return [g, h, *torch.autograd.grad(h.cos().sum(), x)]

    wanted = second(x)
    with swapping() as engine:
        for _ in range(STEPS):
            engine.begin_step()
            if inside:
                assert equal(second(x), wanted)
                continue
            loss = pooled(x, torch.tanh)
            with torch.autograd.graph.saved_tensors_hooks(lambda t: t, lambda t: t):
                (g,) = torch.autograd.grad(loss, x, create_graph=True)
                (h,) = torch.autograd.grad(g.square().sum(), x)
            assert equal([g, h], wanted[:2])
    assert let_go or inside  # there, a backward is a step, too


def test_another_operator_at_the_place_gets_the_values(let_go, given_up):
    x = images()

    def either(x, *, reads):
        h = x * 2
        y = torch.cos(h)[..., ::2, ::2] if reads else F.max_pool2d(h, 2)
        return torch.sin(y).sum()

    for which in ((0, 0, 1, 1, 0, 0), (0, 1, 0, 1, 1, 1)):
        with swapping() as engine:
            for reads in which:
                loss = partial(either, reads=reads)
                assert equal(grads(engine, loss, x), plain(loss, x))
            assert engine.stats.fallbacks == 0
    assert let_go
    assert given_up


@pytest.mark.usefixtures("by_price")
def test_one_whose_node_is_not_found_stays_and_goes_the_general_way(let_go, given_up):
    x = images()

    def last(x):
        return F.max_pool2d(x * 2, 2).sum()  # nothing is saved after it

    wanted = torch.autograd.grad(last(x), x)
    with swapping(codec="raw") as engine:
        for _ in range(STEPS):
            assert equal(grads(engine, last, x), wanted)
        stats = engine.stats
        assert stats.kept_by_reason["unproven"] == 1
        assert stats.by_codec["raw"].count >= STEPS - 1
    assert let_go == []
    assert given_up == [(2, 3, 8, 8)]


def test_the_search_for_a_node_ends(let_go, given_up):
    x, others = images(), torch.randn(4, requires_grad=True)

    def late(x):
        y = F.max_pool2d(x * 2, 2)
        between = sum(torch.sin(others * n).sum() for n in range(unread_places.MOST_LOOKS + 1))
        given_up_by_then.append(len(given_up))
        return torch.sin(y).sum() + between

    given_up_by_then: list[int] = []
    wanted = torch.autograd.grad(late(x), x)
    with swapping() as engine:
        for _ in range(3):
            assert equal(grads(engine, late, x), wanted)
    assert given_up_by_then == [0, 0, 1, 1]
    assert let_go == []


def test_a_graph_that_lives_on_has_its_values(let_go, given_up):
    x = images()
    wanted = torch.autograd.grad(pooled(x), x)
    with swapping() as engine:
        for _ in range(2):
            grads(engine, pooled, x)
        engine.begin_step()
        y = F.max_pool2d(x * 2, 2)
        assert given_up == []
        engine.begin_step()  # no tensor after it has led to the node
        assert given_up == [(2, 3, 8, 8)]
        assert equal(torch.autograd.grad(torch.sin(y).sum(), x), wanted)
    assert len(let_go) == 1


@pytest.mark.parametrize("layout", [torch.channels_last, torch.contiguous_format])
def test_gradients_have_the_same_strides(layout, let_go):
    x = images()
    strides = []

    def laid_out(x):
        h = (x * 2).contiguous(memory_format=layout)
        h.register_hook(lambda gradient: strides.append(gradient.stride()))
        return torch.sin(F.max_pool2d(h, 2)).sum()

    wanted = torch.autograd.grad(laid_out(x), x)
    with swapping() as engine:
        for _ in range(3):
            assert equal(grads(engine, laid_out, x), wanted)
    assert strides == 4 * strides[:1]
    assert len(let_go) == 2


def test_a_graph_that_is_dropped_gives_up_nothing(let_go, given_up):
    x = images()
    with swapping() as engine:
        for _ in range(2):
            grads(engine, pooled, x)
        engine.begin_step()
        F.max_pool2d(x * 2, 2)
        gc.collect()
        grads(engine, pooled, x)
    assert len(let_go) == 2
    assert given_up == []


def test_others_that_save_the_same_memory_have_its_values(let_go):
    x = images()

    def many(x):
        h = torch.tanh(x)  # saves its result
        p, q = F.avg_pool2d(h, 2), F.max_pool2d(h, 2)  # unread
        r = torch.cos(h.view(2, -1))  # a view of it
        return (torch.sin(p) + torch.sin(q)).sum() + r.sum() + (h * h).sum()

    wanted = torch.autograd.grad(many(x), x)
    with swapping() as engine:
        for _ in range(STEPS + 1):
            assert equal(grads(engine, many, x), wanted)
        assert_empty(engine)
        found = engine.stats
        assert "unread" not in found.by_codec  # no byte goes that is not counted for the others
        assert found.deduplicated >= 2 * STEPS
    assert len(let_go) == 2 * STEPS


def test_no_tensor_is_computed_again_from_one(let_go, monkeypatch):
    monkeypatch.setattr("cswap.advisor.advisor.Advisor.pays_again", lambda *_, **__: True)
    x, w = images(), torch.randn(8, 8, requires_grad=True)

    def both(x, w):
        h = torch.sin(x)
        p = F.avg_pool2d(h, 2)
        y = F.gelu(p)  # saves p; the product saves y, which is computed again from it
        return ((y @ w[:4, :4]).sum() + (F.gelu(h) @ w).sum()) * 2

    wanted = torch.autograd.grad(both(x, w), (x, w))
    with swapping() as engine:
        for _ in range(STEPS):
            assert equal(grads(engine, both, x, w), wanted)
        assert engine.stats.by_codec["remat"].count
        assert engine.stats.fallbacks == 0
    assert let_go


def test_threads_save_at_the_same_time(let_go):
    x = images()
    wanted = torch.autograd.grad(pooled(x), x)
    with swapping() as engine:
        for _ in range(2):
            grads(engine, pooled, x)

        def train(_):
            with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
                return [torch.autograd.grad(pooled(x), x) for _ in range(20)]

        with ThreadPoolExecutor(4) as threads:
            for found in threads.map(train, range(4)):
                assert all(equal(one, wanted) for one in found)
        assert engine.stats.fallbacks == 0
    assert let_go


# ------------------------------------------------------------------------------ random programs

OPERATORS = {
    "pool": lambda x: F.max_pool2d(x, 3, 1, padding=1),
    "average": lambda x: F.avg_pool2d(x, 3, 1, padding=1),
    "reflect": lambda x: F.pad(x, (1, 1, 1, 1), "reflect")[..., 1:-1, 1:-1],
    "gather": lambda x: x.gather(-1, torch.arange(x.shape[-1]).flip(0).expand(x.shape)),
    "cummax": lambda x: x.cummax(-1)[0],
    "tanh": torch.tanh,
    "sin": torch.sin,
    "square": torch.square,
    "gelu": F.gelu,
    "relu": torch.relu,
    "double": lambda x: x * 2,
    "turn": lambda x: x.transpose(-1, -2),
    "whole": lambda x: x.transpose(-1, -2).contiguous(),
}
UNREAD_ONES = ("pool", "average", "reflect", "gather", "cummax")


def program(rng):
    """Operators and the earlier values that they take: (name, value, value to add or None)."""
    names = list(OPERATORS)
    return [
        (rng.choice(names), rng.randrange(n + 1), rng.choice([None, rng.randrange(n + 1)]))
        for n in range(rng.randrange(3, 14))
    ]


def run(steps, x):
    values = [x * 1.0]
    for name, of, plus in steps:
        y = OPERATORS[name](values[of])
        values.append(y if plus is None else y + values[plus])
    return sum(value.sin().sum() for value in values[-2:])


def changed(steps, rng):
    """The same program, with another operator at some place."""
    n = rng.randrange(len(steps))
    return [*steps[:n], (rng.choice(list(OPERATORS)), *steps[n][1:]), *steps[n + 1 :]]


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(n, marks=pytest.mark.slow) for n in range(2, 60))]
)
def test_random_programs(seed, let_go, given_up):
    rng = random.Random(seed)
    for _ in range(12):
        steps = program(rng)
        x = torch.randn(2, 3, 6, 6, requires_grad=True)
        with swapping() as engine:
            for _ in range(5):
                mine = changed(steps, rng) if rng.random() < 0.3 else steps
                loss = partial(run, mine)
                assert equal(grads(engine, loss, x), plain(loss, x)), (mine, steps)
            assert engine.stats.fallbacks == 0
            assert_empty(engine)
    assert len(let_go) > 20
    assert given_up or seed > 2


def test_the_random_programs_use_rows_of_the_table():
    x = torch.randn(2, 3, 6, 6, requires_grad=True)
    for name in UNREAD_ONES:
        node: Any = OPERATORS[name](x).grad_fn
        names = set()
        while node is not None:
            names.add(type(node).__name__)
            node = node.next_functions[0][0] if node.next_functions else None
        assert names & UNREAD.keys(), name
