"""Rows of tables that a model owns: selected again from the table, or stored."""

from __future__ import annotations

import copy
import random
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional

import cswap
from cswap.engine.saved import leaves
from tests.engine.engines import assert_empty

pytestmark = pytest.mark.usefixtures("_chains_take_no_time", "by_price")

ROWS, WIDTH, BATCH = 300, 64, 512

OPERATORS = ("embedding", "embedding_bag", "index_select", "gather")

WAYS: list[dict[str, Any]] = [{"slowdown": 1e3}, {"fit": "min"}, {"codec": "zvc"}]


class Tables(nn.Module):
    """A row of each table for an example, by one operator for each."""

    writes = False

    def __init__(self, operators=OPERATORS, **options):
        super().__init__()
        torch.manual_seed(0)
        self.operators = operators
        self.embedding = nn.Embedding(ROWS, WIDTH, **options)
        self.bag = nn.EmbeddingBag(ROWS, WIDTH, mode="sum")
        self.selected = nn.Parameter(torch.randn(ROWS, WIDTH))
        self.gathered = nn.Parameter(torch.randn(ROWS, WIDTH))

    def rows(self, operator, ids):
        if operator == "embedding":
            return self.embedding(ids)
        if operator == "embedding_bag":
            return self.bag(torch.cat((ids, ids)), torch.arange(0, 2 * BATCH, 2))
        if operator == "index_select":
            return self.selected.index_select(0, ids)
        return self.gathered.gather(0, ids[:, None].expand(-1, WIDTH))

    def forward(self, ids):
        rows = [self.rows(operator, ids) for operator in self.operators]
        if self.writes:
            with torch.no_grad():
                self.embedding.weight.mul_(0.9)
        return torch.stack([row.sin().sum() for row in rows]).sum()  # sin saves its argument


def batch(seed=0):
    return torch.randint(ROWS, (BATCH,), generator=torch.Generator().manual_seed(seed))


def sgd(parameters):
    return torch.optim.SGD(parameters, 0.1)


def in_turn(net, optimizer):
    for i in range(6):
        optimizer.zero_grad()
        net(batch(i)).backward()
        optimizer.step()


def one_step_late(net, optimizer):
    """Each backward comes after the optimizer has used the gradients of the one before."""
    waiting = None
    for i in range(8):
        loss = net(batch(i))
        if waiting is not None:
            optimizer.step()
            optimizer.zero_grad()
            waiting.backward()
        waiting = loss


def in_backward(net, _):
    """Each parameter has an optimizer of its own, which steps as soon as its gradient is there."""
    for p in net.parameters():
        optimizer = sgd([p])

        def step(p, optimizer=optimizer):
            optimizer.step()
            p.grad = None

        p.register_post_accumulate_grad_hook(step)
    for i in range(6):
        net(batch(i)).backward()


def trained(step, *, net=None, **options):
    """Parameters after some steps, without cswap and with it."""
    net = Tables() if net is None else net
    plain = copy.deepcopy(net)
    step(plain, sgd(plain.parameters()))
    handle = cswap.install(net, min_bytes=0, **options)
    step(net, sgd(net.parameters()))
    found = [[p.detach().clone() for p in one.parameters()] for one in (plain, net)]
    return (*found, handle)


@pytest.fixture
def copies(monkeypatch):
    """Tables that were copied since an optimizer was about to write them."""
    found, real = [], leaves.KeptLeaf.cast

    def noted(self, casts):
        found.append(self)
        real(self, casts)

    monkeypatch.setattr(leaves.KeptLeaf, "cast", noted)
    return found


@pytest.mark.parametrize("step", [in_turn, one_step_late, in_backward])
@pytest.mark.parametrize("options", WAYS, ids=str)
def test_training_is_bit_equal_and_rows_are_selected_again(options, step, computed, copies):
    # A gather saves its table, too: torch raises where that is written before backward.
    operators = OPERATORS[:-1] if step is one_step_late else OPERATORS
    wanted, found, handle = trained(step, net=Tables(operators), **options)
    assert all(map(torch.equal, wanted, found))
    assert handle.stats.fallbacks == 0
    assert set(operators) <= set(computed)
    assert bool(copies) is (step is one_step_late)
    assert_empty(handle.engine)


@pytest.mark.parametrize("operator", OPERATORS)
def test_after_the_first_steps_rows_are_not_held(operator):
    net = Tables((operator,))
    handle = cswap.install(net, min_bytes=0, codec="raw")
    in_turn(net, sgd(net.parameters()))
    # In the first step nobody knows who writes the table, and what was stored is looked at later.
    assert handle.stats.by_codec["remat"].raw == 2 * 4 * BATCH * WIDTH
    handle.remove()


def test_a_stack_of_rows_of_many_tables(computed):
    class Stack(nn.Module):
        def __init__(self):
            super().__init__()
            self.tables = nn.ModuleList(nn.Embedding(ROWS, WIDTH) for _ in range(26))

        def forward(self, ids):
            return torch.stack([table(ids) for table in self.tables]).sin().sum()

    net = Stack()
    wanted, found, handle = trained(in_turn, net=net, codec="raw")
    assert all(map(torch.equal, wanted, found))
    # All tables are known after the first step: see the test above.
    assert computed == [">".join(["embedding"] * 26 + ["stack"])] * 2
    handle.remove()


def test_tables_are_copied_in_one_step_only(copies, computed):
    # A copy may be larger than the rows: a program that steps before each backward stores them.
    net = Tables(("embedding",))
    *_, handle = trained(one_step_late, net=net, slowdown=1e3)
    assert [held.tensor.shape for held in copies] == [(ROWS, WIDTH)]
    assert computed.count("embedding") == 1
    table = net.embedding.weight
    assert handle.engine._state.recomputer.leaves.known[id(table)].was_copied


def writes(net, write):
    """Train; before the last backward, somebody writes. Returns its loss."""
    optimizer = sgd(net.parameters())
    for i in range(6):
        loss = net(batch(i))
        if i == 5:
            write(net.embedding.weight)
            return loss
        loss.backward()
        optimizer.step()
    raise AssertionError


@pytest.mark.parametrize(
    "write",
    [
        lambda weight: weight.detach().mul_(2),
        lambda weight: setattr(weight, "data", 2 * weight.data),
        lambda weight: setattr(weight, "data", torch.zeros(0)),
    ],
)
def test_who_else_writes_a_table_meanwhile_gets_an_error(write):
    net = Tables()
    with cswap.install(net, min_bytes=0, slowdown=1e3):
        loss = writes(net, write)
        with pytest.raises(RuntimeError, match=r"modified by an inplace operation.*remat=False"):
            loss.backward()


def keep_gradients(net, kept):
    kept.append([None if p.grad is None else p.grad.clone() for p in net.parameters()])


def renormed(net, keep):
    """``max_norm``: each forward writes the rows that it looks up."""
    for i in range(6):
        optimizer = sgd(net.parameters())
        optimizer.zero_grad()
        (net(batch(i)) + net(batch(i + 1))).backward()
        keep()
        optimizer.step()


def written_after_the_look_up(net, keep):
    """In later steps, forward writes the table between the look-up and backward."""
    optimizer = sgd(net.parameters())
    for i in range(6):
        net.writes = i > 0
        optimizer.zero_grad()
        net(batch(i)).backward()
        keep()
        optimizer.step()


def without_an_optimizer_of_torch(net, keep):
    """Tables are written by hand while the graph of the next step waits."""
    waiting = None
    for i in range(6):
        loss = net(batch(i))
        if waiting is not None:
            with torch.no_grad():
                for p in net.parameters():
                    p.sub_(0.1)
            waiting.backward()
            keep()
        waiting = loss


@pytest.mark.parametrize("options", [{}, *WAYS, {"keep_last": 1}], ids=str)
@pytest.mark.parametrize(
    "program", [renormed, written_after_the_look_up, without_an_optimizer_of_torch]
)
def test_programs_that_write_tables_at_other_times_have_plains_gradients(
    program, options, computed
):
    found = []
    for chosen in (None, options):
        net = Tables(("embedding",), max_norm=1.0 if program is renormed else None)
        gradients: list[list[torch.Tensor | None]] = []
        handle = None if chosen is None else cswap.install(net, min_bytes=0, **chosen)
        program(net, partial(keep_gradients, net, gradients))
        found.append(gradients)
        if handle is not None:
            handle.remove()
    assert found[0]
    for mine, its in zip(*found, strict=True):
        for a, b in zip(mine, its, strict=True):
            assert (a is None and b is None) or torch.equal(a, b)
    assert "embedding" not in computed


def test_a_table_of_another_model_is_not_held(computed):
    table = nn.Parameter(torch.randn(ROWS, WIDTH))

    class Others(nn.Module):
        def forward(self, ids):
            return table.index_select(0, ids).sin().sum()

    net = Others()
    net.own = nn.Parameter(torch.ones(1))
    with cswap.install(net, min_bytes=0, slowdown=1e3):
        in_turn(net, sgd([table]))
    assert "index_select" not in computed


class RandomTables(nn.Module):
    """Look-ups, padding and stacks in a random order."""

    def __init__(self, seed, *, late):
        super().__init__()
        chance = random.Random(seed)
        torch.manual_seed(seed)
        self.tables = nn.ModuleList(nn.Embedding(50, 8) for _ in range(2))
        self.bags = nn.ModuleList(
            nn.EmbeddingBag(50, 8, mode=mode, include_last_offset=chance.random() < 0.5)
            for mode in ("sum", "mean", "max")
        )
        kinds = ["look up", "bag", "select", *([] if late else ["gather"])]
        self.layers = [
            (chance.choice(kinds), chance.choice(["", "pad", "crop", "reflect", "stack"]),
             chance.randrange(2), chance.choice([0.0, -0.0, 1.5]))
            for _ in range(6)
        ]  # fmt: skip

    def rows(self, kind, number, ids):
        table = self.tables[number].weight
        if kind == "look up":
            return self.tables[number](ids)
        if kind == "bag":
            bag = self.bags[number]
            n = len(ids) // 2
            return bag(ids, torch.arange(0, 2 * n + bag.include_last_offset, 2))
        if kind == "gather":
            return table.gather(0, ids[:, None].expand(-1, 8))
        return table.index_select(0, ids)

    def forward(self, ids, step):
        total = 0.0
        for kind, shape, number, value in self.layers:
            rows = self.rows(kind, number, ids)
            if shape == "pad":  # in some steps with another number
                rows = functional.pad(rows, (0, 2, 1, 0), value=value if step % 3 else 2.0)
            elif shape == "crop":
                rows = functional.pad(rows, (0, -2))
            elif shape == "reflect":
                rows = functional.pad(rows, (3, 1), mode="reflect")
            elif shape == "stack":
                rows = torch.stack([rows, self.tables[0](ids[: len(rows)])])
            total = total + rows.sin().sum()
        return total


@pytest.fixture(scope="module")
def reached():
    return set[str]()


@pytest.mark.parametrize("seed", range(12))
def test_random_models_and_orders_of_steps(seed, computed, copies, reached):
    late = seed % 2 == 0

    def step(net, optimizer):
        draws = random.Random(seed)
        waiting: list[torch.Tensor] = []
        for i in range(30):
            turns = i < 8 or not late  # later, steps come between forward and backward
            what = "turn" if turns else draws.choice(["forward", "forward", "backward", "step"])
            ids = torch.randint(50, (40,), generator=torch.Generator().manual_seed(i))
            if what == "turn":
                net(ids, i).backward()
                optimizer.step()
            elif what == "forward" and len(waiting) < 3:
                waiting.append(net(ids, i))
            elif what == "backward" and waiting:
                waiting.pop(draws.randrange(len(waiting))).backward()
            elif what == "step":
                optimizer.step()

    options = random.Random(seed).choice(WAYS)
    wanted, found, handle = trained(step, net=RandomTables(seed, late=late), **options)
    assert all(map(torch.equal, wanted, found))
    assert handle.stats.fallbacks == 0
    reached |= {name for chain in computed for name in chain.split(">")}
    if copies:
        reached.add("copy of a table")


def test_the_random_models_have_reached_every_row(reached):
    if not reached:
        pytest.skip("they have not run")
    assert reached >= {*OPERATORS, "pad", "stack", "copy of a table"}
