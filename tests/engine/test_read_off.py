"""Copies whose argument is read off them: a handle counts the part that is held."""

from __future__ import annotations

import pytest
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional

import cswap
from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.config import SwapConfig
from tests.engine.engines import assert_empty

pytestmark = pytest.mark.usefixtures("_chains_take_no_time", "no_limit")

ROWS, WIDTH, EDGES = 64, 64, 4096
PART = ROWS * WIDTH * 4


def given():
    return torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(ROWS, (EDGES,))


def message(x, i):
    y = x.index_select(0, i)
    return (y.view(-1, 8, 8) * y.view(-1, 8, 8)).sum()


def gathered(engine, x, i, **options):
    engine.begin_step()
    return torch.autograd.grad(message(x, i), x, **options)[0]


@pytest.mark.parametrize("min_bytes", [0, EDGES * 8 + 1], ids=["index_leaves", "index_stays"])
def test_gradients_are_bit_equal_and_the_part_counts(min_bytes):
    x, i = given()
    wanted = torch.autograd.grad(message(x, i), x)[0]
    with cswap.swapping(min_bytes=min_bytes) as engine:
        for _ in range(4):
            assert torch.equal(gathered(engine, x, i), wanted)
        remat = engine.stats.by_codec["remat"]
        assert (remat.count, remat.raw, remat.encoded) == (4, 4 * EDGES * WIDTH * 4, 4 * PART)
        assert engine.stats.fallbacks == 0
        assert_empty(engine)


def test_between_forward_and_backward_only_the_part_is_held():
    x, i = given()
    with cswap.swapping(min_bytes=EDGES * 8 + 1) as engine:
        for _ in range(3):
            engine.begin_step()
            y = x.index_select(0, i)
            storage = StorageWeakRef(y.untyped_storage())
            loss = (y * y).sum()
            del y
            assert storage.expired()
            assert engine.stats.device_bytes == PART
            loss.backward(retain_graph=True)
            loss.backward()
            del loss
            assert_empty(engine)


def test_a_dropped_graph_gives_the_part_back():
    x, i = given()
    with cswap.swapping(min_bytes=0) as engine:
        loss = message(x, i)
        assert engine.stats.device_bytes >= PART
        del loss
        assert_empty(engine)


def test_what_is_computed_from_it_runs_again_on_it():
    x, i = given()

    def loss(x):
        y = x.index_select(0, i)
        return (functional.gelu(y) * y).sum()

    wanted = torch.autograd.grad(loss(x), x)[0]
    with cswap.swapping(min_bytes=0) as engine:
        for _ in range(4):
            engine.begin_step()
            assert torch.equal(torch.autograd.grad(loss(x), x)[0], wanted)
        remat = engine.stats.by_codec["remat"]
        assert (remat.count, remat.encoded) == (8, 4 * PART)
        assert_empty(engine)


def test_an_index_written_into_before_backward_raises_as_without_hooks():
    x, i = given()
    with cswap.swapping(min_bytes=0) as engine:
        for _ in range(2):
            gathered(engine, x, i)
        engine.begin_step()
        loss = message(x, i)
        i.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_an_index_written_into_before_the_copy_is_saved_is_no_input():
    x, i = given()
    with cswap.swapping(min_bytes=0) as engine:
        for _ in range(3):
            engine.begin_step()
            y = x.index_select(0, i)
            i.copy_(i.flip(0))
            loss = (y * y).sum()
            with pytest.raises(RuntimeError, match="modified by an inplace operation"):
                loss.backward()
        assert "remat" not in engine.stats.by_codec


def test_a_part_makes_a_byte_dearer():
    advisor = Advisor(SwapConfig(), None)
    nbytes, seconds = 1 << 20, 4e-4

    def price(held_bytes):
        return advisor.least_price(Site("m"), 0, nbytes, seconds, "cpu", held_bytes=held_bytes)

    free, half, most = price(0), price(nbytes // 2), price(nbytes * 9 // 10)
    assert free is not None
    assert half is not None
    assert free < half
    assert most is None


class Scaled(torch.nn.Module):
    """Nearest upsampling, whose source elements depend on the scale."""

    def forward(self, x, scale):
        y = functional.interpolate(x, scale_factor=scale)
        return (y * y.tanh()).sum()


def test_a_scale_that_is_not_whole_is_stored():
    x = torch.randn(4, 4, 32, 32, requires_grad=True)
    model = Scaled()
    with cswap.install(model, min_bytes=0) as handle:
        for scale in (3.0, 3.0, 3.02, 3.02, 3.0):
            found = torch.autograd.grad(model(x, scale), x)[0]
            assert torch.equal(found, torch.autograd.grad(Scaled()(x, scale), x)[0])
        assert handle.stats.by_codec["remat"].count >= 3
        assert handle.stats.fallbacks == 0


@pytest.mark.parametrize("dim", [0, 1, -2, -3])
def test_a_stack_along_any_dimension(dim):
    tables = [torch.randn(ROWS, WIDTH, requires_grad=True) for _ in range(2)]
    i = torch.randint(ROWS, (2, EDGES))

    def loss():
        y = torch.stack([functional.embedding(n, t) for n, t in zip(i, tables, strict=True)], dim)
        return (y * y).sum()

    wanted = torch.autograd.grad(loss(), tables)
    with cswap.swapping(min_bytes=0) as engine:
        for _ in range(3):
            engine.begin_step()
            assert all(map(torch.equal, torch.autograd.grad(loss(), tables), wanted))
        assert engine.stats.fallbacks == 0
        assert engine.stats.by_codec["remat"].count == 3


@pytest.mark.parametrize("kind", ["stack", "bag"])
def test_another_result_than_that_of_its_rows_is_stored_in_that_step(kind):
    """A write that no version tells, and a bag without rows: compared in each step."""
    table, i = torch.randn(ROWS, WIDTH, requires_grad=True), torch.randint(ROWS, (EDGES,))
    other = torch.randn(ROWS, WIDTH, requires_grad=True)

    def loss(step):
        if kind == "bag":
            offsets = torch.arange(EDGES + 1)
            offsets[-1] -= int(step == 3)
            y = functional.embedding_bag(i, table, offsets, mode="mean", include_last_offset=True)
            return (y * y).sum()
        a = functional.embedding(i, table)
        if step == 3:
            with torch.no_grad():
                a[7:99].mul_(2)
        y = torch.stack([a, functional.embedding(i, other)])
        return (y * y).sum()

    wanted = [torch.autograd.grad(loss(step), table)[0] for step in range(6)]
    with cswap.swapping(min_bytes=EDGES * 8 + 9) as engine:
        for step in range(6):
            engine.begin_step()
            assert torch.equal(torch.autograd.grad(loss(step), table)[0], wanted[step])
        assert engine.stats.by_codec["remat"].count >= 3
        assert engine.stats.fallbacks == 0
