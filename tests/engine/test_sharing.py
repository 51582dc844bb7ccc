"""One handle for several saved tensors: only where it is sure that they are equal."""

from __future__ import annotations

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.engine.saved import aliases
from cswap.hooks import Swapping
from tests.engine.engines import assert_empty, engine_over_a_link

ALL: dict[str, Any] = {"min_bytes": 0, "codec": "zvc"}
N = 1 << 12


@pytest.fixture
def swapping():
    return lambda **more: cswap.swapping(**{**ALL, **more})


def test_statistics_that_batch_norm_writes_without_counting(swapping):
    def gradient(context):
        torch.manual_seed(0)
        norm = nn.BatchNorm1d(N)
        x = torch.randn(8, N, requires_grad=True)
        with context:
            norm.train()
            y = norm(x * 2).sum()
            norm.eval()
            z = norm(x * 3).pow(2).sum()
        return torch.autograd.grad(y * 0 + z, x)[0]

    expected = gradient(nullcontext())
    assert torch.equal(gradient(swapping()), expected)
    assert torch.equal(gradient(cswap.swapping()), expected)


def test_a_leaf_that_is_changed_through_data_between_two_saves(swapping):
    x = torch.randn(N, requires_grad=True)
    with swapping():
        y = (x * x).sum()
        x.data.mul_(2)
        z = (x * x).sum()
    (found,) = torch.autograd.grad(z, x)
    assert torch.equal(found, 2 * x.detach())
    del y


@pytest.mark.parametrize("check", ["gradcheck", "gradgradcheck"])
def test_gradcheck_perturbs_its_inputs_without_counting(swapping, check):
    x = torch.randn(5, dtype=torch.float64, requires_grad=True)
    with swapping():
        assert getattr(torch.autograd, check)(lambda t: (t.exp() * t).sin(), x)


def test_a_mask_that_every_layer_saves_is_held_once_as_without_hooks(swapping):
    x = torch.randn(64, 64, requires_grad=True)
    mask = torch.rand(64, 64) < 0.5

    def loss(h):
        for _ in range(6):
            h = (h * 2).masked_fill(mask, 0.0)
        return h.sum()

    with swapping() as engine:
        torch.autograd.grad(loss(x), x)
        engine.begin_step()
        first = engine.stats
        result = loss(x)
        stats = engine.stats
        # from the second step on it is not encoded at all
        assert stats.swapped == first.swapped
        assert stats.device_bytes + stats.host_bytes == mask.nbytes
    assert stats.kept_by_reason["saved_again"] == 2
    assert stats.deduplicated == 10
    expected = torch.autograd.grad(loss(x), x)[0]
    assert torch.equal(torch.autograd.grad(result, x)[0], expected)
    del result
    assert_empty(engine)


def test_results_are_still_encoded_once(swapping):
    x = torch.randn(64, 64, requires_grad=True)
    with swapping() as engine:
        h = torch.relu(x)  # saves its own result
        y = (h @ h.t()).sum() + (h * h).sum() + h[:32].exp().sum()
    stats = engine.stats
    assert stats.deduplicated >= 4
    assert "saved_again" not in stats.kept_by_reason
    del h, y


@pytest.mark.parametrize("n", [250, 1000])
def test_a_storage_in_many_slices_is_not_searched_slice_by_slice(n, monkeypatch):
    looked_at = []
    serves = aliases._serves

    def counted(*args, **options):
        looked_at.append(1)
        return serves(*args, **options)

    monkeypatch.setattr(aliases, "_serves", counted)
    x = torch.randn(n, 64, requires_grad=True)
    with cswap.swapping(**ALL) as engine:
        h = x * 1
        total = torch.stack([(row * row).sum() for row in h.unbind()]).sum()
    (found,) = torch.autograd.grad(total, x)
    assert torch.equal(found, 2 * x.detach())
    assert len(looked_at) <= 4 * n  # each row is saved twice
    assert engine.stats.packed >= 2 * n


def test_nested_slices_share_where_they_may(swapping):
    x = torch.randn(64, 64, requires_grad=True)
    with swapping() as engine:
        h = x * 1
        part = h[8:12]
        y = part.exp().sum() + (part * part).sum() + (h[9:11] * 2).sin().sum() + (h[9] * h[9]).sum()
    h = x * 1
    z = h[8:12].exp().sum() + (h[8:12] ** 2).sum() + (h[9:11] * 2).sin().sum() + (h[9] ** 2).sum()
    (expected,) = torch.autograd.grad(z, x)
    assert torch.allclose(torch.autograd.grad(y, x)[0], expected)
    assert engine.stats.deduplicated >= 2


def test_over_a_link_a_leaf_that_is_saved_again_stays_from_the_next_step_on():
    x = torch.randn(N, requires_grad=True)
    with Swapping(engine_over_a_link(0, **ALL)) as engine:
        for held in ((1, 1), (0, 1)):  # at first, it is on its way
            engine.begin_step()
            before = engine.stats
            y = x * x
            after = engine.stats
            engine.synchronize()
            assert (
                after.kept_by_reason["saved_again"] - before.kept_by_reason.get("saved_again", 0)
                == held[1]
            )
            assert engine.stats.swapped - before.swapped == held[0]
            assert torch.equal(torch.autograd.grad(y.sum(), x)[0], 2 * x)
            del y


def test_a_function_that_saves_a_view_of_a_parameter_as_its_result_makes_no_cycle():
    class Flat(torch.autograd.Function):
        @staticmethod
        def forward(ctx, w):
            out = w.view(-1)
            ctx.save_for_backward(out)
            return out

        @staticmethod
        def backward(ctx, gradient):
            (out,) = ctx.saved_tensors
            return (gradient * out).view(8, 8)

    class Mark:
        pass

    w = torch.nn.Parameter(torch.randn(8, 8))
    mark = Mark()
    alive = weakref.ref(mark)
    with cswap.swapping(min_bytes=0):
        y = Flat.apply(w)
        y.grad_fn.metadata["mark"] = mark
        del y, mark
    gc.collect()
    assert alive() is None
