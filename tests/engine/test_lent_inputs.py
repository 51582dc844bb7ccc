"""Tensors without handles from which others are computed again: they wait for their own users."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

import cswap
from cswap.engine.transfer.in_line import InLine
from tests.engine.engines import assert_empty
from tests.engine.test_again_slots import equal, gradients, leaves, swapping, twice

pytestmark = pytest.mark.usefixtures("_chains_take_no_time", "by_price")


def chained(h, w):
    """Three tensors, each computed again from the one before; each is saved by a product, too."""
    y, found = h, 0.0
    for function in (functional.gelu, functional.silu, torch.tanh):
        y = function(y)
        found = found + (y @ w).square().sum()
    return found


def multiplied(h, w):
    """The product saves gelu(h) and h.sin(); the matrix product saves their product."""
    return ((functional.gelu(h) * h.sin()) @ w).sum()


@pytest.mark.parametrize(("loss", "n_again"), [(chained, 3), (multiplied, 3)])
def test_a_tensor_that_others_are_computed_from_is_computed_once(loss, n_again, taken, computed):
    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    with swapping() as engine:
        gradients(engine, loss, given)  # chains are tried
        for _ in range(4):
            del computed[:]
            assert equal(gradients(engine, loss, given), wanted)
            assert len(computed) == n_again
            assert engine._state.results.nbytes == 0
        assert engine.stats.fallbacks == 0
        assert_empty(engine)
    assert taken == 4 * n_again * [True]


def test_an_encoding_that_others_are_computed_from_is_decoded_once(monkeypatch, taken):
    def loss(x, w):
        return (functional.gelu(x * 2.0) @ w).sum()

    decoded, memory = [], InLine.decode

    def noted(self, stored, dtype, numel):
        decoded.append(numel * dtype.itemsize)
        return memory(self, stored, dtype, numel)

    monkeypatch.setattr(InLine, "decode", noted)
    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    with cswap.swapping(min_bytes=0, codec="zvc") as engine:
        for _ in range(4):
            del decoded[:]
            assert equal(gradients(engine, loss, given), wanted)
            assert engine._state.results.nbytes == 0
        assert decoded.count(given[0].nbytes) == 1
        assert_empty(engine)
    assert taken == 3 * [True]


@pytest.mark.parametrize(("loss", "n_again"), [(twice, 1), (chained, 3)])
def test_a_retained_graph_whose_tensors_wait_for_others(loss, n_again, taken):
    given = leaves()
    wanted = torch.autograd.grad(loss(*given), given)
    with swapping() as engine:
        gradients(engine, loss, given)
        engine.begin_step()
        total = loss(*given)
        for retain in (True, True, False):
            assert equal(torch.autograd.grad(total, given, retain_graph=retain), wanted)
        assert engine._state.results.nbytes == 0
        assert_empty(engine)
    assert taken == n_again * [True]


def test_what_is_lent_outside_of_a_backward_does_not_wait(taken):
    h, w = leaves()
    with swapping() as engine:
        gradients(engine, chained, (h, w))
        engine.begin_step()
        y = functional.gelu(h)
        first = (y @ w).square().sum()
        z = functional.silu(y)
        del y
        product = z @ w
        assert taken == [True, True]
        assert torch.equal(product.grad_fn._saved_self, z)
        assert engine._state.results.nbytes == 0
        del z
        (first + product.square().sum()).backward()
        del product, first
        assert_empty(engine)


def test_a_lent_tensor_that_nobody_asks_for_goes_with_the_backward(taken):
    # Of silu(gelu(h)) alone the gradient is asked for with respect to the second weight.
    def loss(h, w, v):
        y = functional.gelu(h)
        return (y @ w).sum() + (functional.silu(y) @ v).sum()

    h, w = leaves()
    v = torch.randn_like(w, requires_grad=True)
    (wanted,) = torch.autograd.grad(loss(h, w, v), v)
    with swapping() as engine:
        for _ in range(3):
            engine.begin_step()
            found = loss(h, w, v)
            (gradient,) = torch.autograd.grad(found, v)
            assert torch.equal(gradient, wanted)
            assert engine._state.results.nbytes == 0
            del found
        assert_empty(engine)
    assert taken == 4 * [True]
