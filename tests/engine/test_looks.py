"""Tensors that stay because no codec is worth its time stay until the next look."""

from typing import Any

import pytest
import torch
from torch import nn

import cswap
from cswap.engine.order.looks import EARLY, EVERY

OPTIONS: dict[str, Any] = {"min_bytes": 0, "remat": False}


class Scaled(nn.Module):
    """Saves one tensor, twice: as both factors of a product."""

    def forward(self, x):
        y = x * 2.0
        return (y * y.view(-1).view_as(y)).sum()


def dense(n=1 << 12, seed=0):
    """Bytes that no lossless codec shrinks."""
    bits = torch.randint(-(2**31), 2**31 - 1, (n,), generator=torch.Generator().manual_seed(seed))
    return bits.to(torch.int32).bitwise_and_(~0x40000000).view(torch.float32).requires_grad_()


@pytest.fixture
def asked(monkeypatch):
    """Positions for which the advisor was asked, in order."""
    from cswap.advisor.advisor import Advisor

    positions, choose = [], Advisor.choose

    def noted(self, x, site, position, **options):
        positions.append(position)
        return choose(self, x, site, position, **options)

    monkeypatch.setattr(Advisor, "choose", noted)
    return positions


def test_a_tensor_that_stays_is_counted_and_no_more(asked):
    model, x = Scaled(), dense()
    with cswap.install(model, **OPTIONS) as handle:
        for step in range(EARLY[0]):
            loss = model(x)
            looked_at = step == 0
            assert handle.stats.device_bytes == looked_at * x.nbytes
            loss.backward()
            del loss
            stats = handle.stats
            assert (stats.packed, stats.deduplicated) == (2 * step + 2, step + 1)
            assert stats.kept_bytes_by_reason == {"does_not_pay": (step + 1) * x.nbytes}
            assert stats.device_bytes == 0
        assert asked == [0]
        assert stats.peak_saved_bytes == x.nbytes
        model(x).backward()
        assert asked == [0, 0]


def test_peaks_are_those_of_steps_in_which_all_is_looked_at():
    class Both(nn.Module):
        def forward(self, x, sparse):
            return ((x * 2.0).square() + (sparse * 2.0).square()).sum()

    model, x, sparse = Both(), dense(1 << 16), torch.zeros(1 << 16, requires_grad=True)
    with cswap.install(model, **OPTIONS) as handle:
        peaks = set()
        for _ in range(EARLY[0] + 2):
            model(x, sparse).backward()
            stats = handle.stats
            peaks.add((stats.peak_device_bytes, stats.peak_saved_bytes))
        assert stats.kept_by_reason["does_not_pay"] == EARLY[0] + 2
        assert stats.swapped == EARLY[0] + 2
    assert len(peaks) == 1
    assert peaks.pop()[1] >= x.nbytes + sparse.nbytes


def test_looks_become_rare(asked):
    model, x = Scaled(), dense()
    looked = []
    with cswap.install(model, **OPTIONS):
        for step in range(3 * EVERY + 1):
            asked.clear()
            model(x).backward()
            if asked:
                looked.append(step)
    assert looked == [0, *EARLY, EVERY, 2 * EVERY, 3 * EVERY]


def test_a_tensor_that_becomes_sparse_is_swapped_in_the_next_look():
    n = 1 << 19  # decoding zeros takes less time than the memory is worth
    model, sparse = Scaled(), torch.zeros(n, requires_grad=True)
    with cswap.install(model, **OPTIONS) as handle:
        model(dense(n)).backward()
        for _ in range(EARLY[0] - 1):
            model(sparse).backward()
        assert handle.stats.swapped == 0
        model(sparse).backward()
        assert handle.stats.swapped == 1


def test_another_tensor_in_its_place_is_looked_at(asked):
    model = Scaled()
    with cswap.install(model, **OPTIONS):
        model(dense()).backward()
        model(dense(1 << 13)).backward()
        assert asked == [0, 0]


def test_gradients_are_those_without_cswap():
    model, x = Scaled(), dense()
    model(x).backward()
    want, x.grad = x.grad, None
    with cswap.install(model, **OPTIONS):
        for _ in range(3):
            loss = model(x)
            loss.backward(retain_graph=True)
            assert torch.equal(x.grad, want)
            x.grad = None
            loss.backward()
            assert torch.equal(x.grad, want)
            x.grad = None


def test_a_tensor_that_stays_and_is_written_into_raises():
    class Written(nn.Module):
        def forward(self, x, *, write):
            y = x * 2.0
            out = y.square()
            if write:
                y.add_(1)
            return out.sum()

    model, x = Written(), dense()
    with cswap.install(model, **OPTIONS):
        model(x, write=False).backward()
        loss = model(x, write=True)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


def test_all_are_looked_at_where_a_limit_decides():
    model, x = Scaled(), dense()
    with cswap.install(model, **OPTIONS, host_limit=1 << 30) as handle:
        for _ in range(3):
            model(x).backward()
        places = handle.engine.packer.book.begun.places
        assert places
        assert all(place.stay is None for place in places)
