"""CSwap+'s equations against numbers worked out by hand."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from cswap.advisor.advisor import Advisor
from cswap.advisor.call_site import Site
from cswap.advisor.cswap_plus import (
    Dense,
    Swap,
    dense_bytes,
    sliding_down,
    sparse_bytes,
    top_bottom,
)
from cswap.codecs.tolerance import COARSE, EXACT
from cswap.config import SwapConfig
from cswap.errors import ConfigError

GB = 1e9


def test_costs_of_equations_3_to_6():
    swap = Swap(1.17 * GB, 11.7 * GB, 10.6 * GB, forward_s=0.04, backward_s=0.2)
    assert swap.uncompressed_cost_s == pytest.approx(0.1 - 0.04)  # the way back is hidden
    encoded = sparse_bytes(swap.nbytes, 0.5)
    assert encoded == 0.585 * GB
    assert swap.compressed_cost_s(encoded, 0.003, 0.002) == pytest.approx(0.005 + 0.05 - 0.04)
    assert swap.pays(encoded, 0.003, 0.002)
    assert not swap.pays(encoded, 0.06, 0.002)
    hidden = Swap(1.17 * GB, 11.7 * GB, 10.6 * GB, forward_s=0.2, backward_s=0.2)
    assert hidden.uncompressed_cost_s == 0
    assert not hidden.pays(0, 1e-9, 0)  # what is hidden is never compressed


def test_sizes_of_equation_7():
    assert sparse_bytes(1000, 0.75) == 250
    assert dense_bytes(1000, 8, 32) == 250


def test_the_papers_schedule():
    rates = [sliding_down(100, 20, epoch, 90) for epoch in range(90)]
    assert rates[0] == 100
    assert rates.index(20) == 80  # "in the 81st epoch"
    assert all(a - b == 1 for a, b in itertools.pairwise(rates[:81]))
    assert {sliding_down(40, 10, epoch, 90) for epoch in range(90)} == {40}  # 0.33 rounds to 0


def dense(nbytes, forward_s, backward_s, seconds):
    swap = Swap(nbytes, 10 * GB, 10 * GB, forward_s, backward_s)
    return Dense(swap, seconds)


def brute(tensors, most):
    def largest(holds):
        return max((p for p in range(1, most + 1) if holds(p)), default=0)

    top = max(
        largest(lambda p, t=t: t.swap.pays(t.swap.nbytes * p / most, t.codec_s, 0.0))
        for t in tensors
    )
    bottom = min(
        max(1, largest(lambda p, t=t: t.swap.exposed_s(t.swap.nbytes * p / most) == 0))
        for t in tensors
    )
    return (top, bottom) if top > bottom else None


def test_algorithm_1_finds_what_trying_every_rate_finds():
    rng = np.random.default_rng(0)
    found = []
    for _ in range(200):
        tensors = [
            dense(
                rng.uniform(0.1, 2) * GB,
                rng.uniform(0, 0.2),
                rng.uniform(0, 0.2),
                rng.uniform(0, 0.04),
            )
            for _ in range(rng.integers(1, 5))
        ]
        found.append(top_bottom(tensors, 64))
        assert found[-1] == brute(tensors, 64)
    assert any(found)
    assert None in found


def test_where_nothing_pays_there_is_none():
    assert top_bottom([dense(GB, 10, 10, 0.001)], 64) is None


def test_the_pricing_rule_compresses_what_is_sparse_and_sends_the_rest_raw():
    advisor = Advisor(SwapConfig(policy="cswap+"), None)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(1 << 18, generator=generator)

    def choose(values, position):
        advice = advisor.choose(values, Site(), position, tolerance=EXACT, may_keep=True)
        assert advice.codec is not None
        return advice.codec.name

    assert choose(x.relu(), 0) == "zvc"
    assert choose(x, 1) == "raw"
    assert choose((x > 0).long(), 2) == "raw"  # the paper's tensors are floats


def test_values_are_sampled_once_per_epoch():
    advisor = Advisor(SwapConfig(policy="cswap+"), None)
    sparse = torch.randn(1 << 18, generator=torch.Generator().manual_seed(0)).relu()
    dense = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))

    def choose(values):
        advisor.begin_step(0.0)
        advice = advisor.choose(values, Site(), 0, tolerance=EXACT, may_keep=False)
        assert advice.codec is not None
        return advice.codec.name

    assert choose(sparse) == "zvc"
    assert {choose(dense) for _ in range(30)} == {"zvc"}
    advisor.begin_epoch(90)
    assert {choose(dense) for _ in range(30)} == {"raw"}


@pytest.mark.parametrize("epochs", [10, 90])
def test_zfp_slides_down_from_what_the_first_epoch_allows(epochs, monkeypatch):
    pytest.importorskip("zfpy")
    advisor = Advisor(SwapConfig(policy="cswap+", lossy="zfp"), None)
    # As on a GPU: on this CPU, zfp is never worth its time.
    monkeypatch.setattr(advisor._paper, "_zfp_s_per_byte", 1e-12)
    dense = torch.randn(1 << 18, generator=torch.Generator().manual_seed(1))

    def choose():
        advice = advisor.choose(dense, Site(), 0, tolerance=COARSE, may_keep=False)
        assert advice.codec is not None
        return advice.codec.name

    assert choose() == "raw"  # the first epoch finds Top and Bottom
    rates = []
    for _ in range(epochs):
        advisor.begin_epoch(epochs)
        rates.append(choose())
    bits = {"raw": 32, "zfp": 16}  # at first, the mildest rates gain less than the advisor's margin
    numbers = [bits.get(rate) or int(rate.removeprefix("zfp:")) for rate in rates]
    assert numbers == sorted(numbers, reverse=True)
    assert numbers[0] > numbers[-1] >= 1
    assert len(set(numbers)) > 5


def test_zfp_needs_the_papers_policy():
    with pytest.raises(ConfigError, match="policy='cswap"):
        Advisor(SwapConfig(lossy="zfp"), None)
