"""The profiler: exact over everything, close from a sample, and cheap."""

from __future__ import annotations

import math

import pytest
import torch

from cswap.profiler import profile, profile_all
from cswap.schema.tensor import DTYPES

FLOATS = [torch.float64, torch.float32, torch.float16, torch.bfloat16]


def test_counts_zeros_repeats_and_spread_exactly():
    x = torch.tensor([0.0, 0.0, 8.0, 4.0, 2.0, 2.0, 2.0**-10, -0.0])
    p = profile_all(x)
    assert (p.sampled, p.nbytes, p.zero_fraction) == (8, 32, 2 / 8)
    assert p.repeat_fraction == 2 / 7
    # less than 1, 3, 7, 15 below the exponent of 8.0: 2**-10 is 13 below, zeros far more
    assert p.spread == (1 / 8, 4 / 8, 4 / 8, 5 / 8)
    assert p.spread_nonzero == (1 / 6, 4 / 6, 4 / 6, 5 / 6)
    assert p.amax == 8.0
    assert p.int_bits is None


@pytest.mark.parametrize(
    ("values", "dtype", "bits"),
    [
        ([7, 7, 7], torch.int64, 0),
        ([-1, 0], torch.int32, 1),
        ([-128, 127], torch.int8, 8),
        ([250, 255], torch.uint8, 3),
        ([True, False, True], torch.bool, 1),
        ([-(2**63), 2**63 - 1], torch.int64, 64),
    ],
)
def test_integer_range_is_that_of_signed_or_unsigned_values(values, dtype, bits):
    assert profile_all(torch.tensor(values, dtype=dtype)).int_bits == bits


@pytest.mark.parametrize("dtype", FLOATS)
def test_largest_finite_magnitude_and_non_finite_words(dtype):
    x = torch.tensor([1.5, -96.0, float("inf"), float("nan"), 2.0**-14 / 4], dtype=dtype)
    p = profile_all(x)
    assert p.amax == 96.0
    assert p.non_finite == 2 / 5
    assert profile_all(x[-1:].clone()).amax == x[-1].item()  # a denormal of float16


@pytest.mark.parametrize("name", sorted(DTYPES))
@pytest.mark.parametrize("numel", [0, 1, 2, 255, 256, 257, 5000])
def test_every_dtype_and_size_has_a_profile(name, numel):
    dtype = getattr(torch, name, None)
    if dtype is None:
        pytest.skip(f"this torch has no {name}")
    d = DTYPES[name]
    x = torch.zeros(numel * d.itemsize, dtype=torch.uint8).view(dtype)
    p = profile(x)
    assert p.nbytes == numel * d.itemsize
    assert p.zero_fraction == (1.0 if numel else 0.0)
    assert p.sampled <= numel * (d.itemsize // d.word)
    assert bool(p.spread) == (d.kind == "float" and numel > 0)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("zeros", [0.0, 0.3, 0.9])
def test_a_sample_is_close_to_the_whole(dtype, zeros):
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(300_000, generator=generator)
    x[torch.rand(x.shape, generator=generator) < zeros] = 0
    x = x.to(dtype)
    p, exact = profile(x), profile(x, samples=x.numel() // 64, piece_words=64)
    # Three standard deviations of a fraction estimated from 4096 words
    assert math.isclose(p.zero_fraction, exact.zero_fraction, abs_tol=3 * 0.5 / 64)
    for mine, true in zip(p.spread_nonzero, exact.spread_nonzero, strict=True):
        assert math.isclose(mine, true, abs_tol=0.1)


def test_a_period_in_the_data_does_not_fool_the_sample():
    x = torch.ones(1 << 18)
    x.view(16, -1)[:, :256] = 0  # where an evenly spaced sample would look
    assert profile(x).zero_fraction < 0.5


def test_values_are_not_changed():
    x = torch.randn(1000)
    before = x.clone()
    profile(x)
    assert torch.equal(x, before)
