"""The profiler: exact over everything, close from a sample, and cheap."""

from __future__ import annotations

import math

import pytest
import torch

from cswap.advisor.candidates import predicted_ratio
from cswap.codecs.registry import get_codec
from cswap.profiler import LateProfile, profile, profile_all
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
    assert p.zero_exponent == 3 / 8
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


@pytest.mark.parametrize(
    "name",
    [n for n, d in DTYPES.items() if d.kind == "float" and d.itemsize <= 2 and hasattr(torch, n)],
)
def test_every_word_of_a_small_float_is_read_as_torch_reads_it(name):
    d = DTYPES[name]
    bits = torch.arange(1 << 8 * d.word, dtype=torch.int32)
    words = bits.to({1: torch.uint8, 2: torch.uint16}[d.word]).view(getattr(torch, name))
    values = words.double()
    finite = torch.isfinite(values)
    p = profile_all(words)
    assert p.amax == values[finite].abs().max()
    assert p.non_finite == 1 - finite.double().mean()
    for i in range(0, len(words), 1 if d.word == 1 else 97):
        expected = values[i].abs().item() if finite[i] else 0.0
        assert profile_all(words[i : i + 1].clone()).amax == expected


@pytest.mark.parametrize("value", [torch.finfo(torch.float64).max, 0.1, 5e-324])
def test_no_bit_of_a_magnitude_is_lost(value):
    assert profile_all(torch.tensor([-value, 0.0], dtype=torch.float64)).amax == value


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


def feature_maps():
    """Maps [8, 64, 32, 32] with patches and channels of unequal scale, before an activation."""
    generator = torch.Generator().manual_seed(7)
    coarse = torch.randn(8, 64, 8, 8, generator=generator)
    x = torch.nn.functional.interpolate(coarse, scale_factor=4)
    x += 0.5 * torch.randn(x.shape, generator=generator)
    return x * torch.exp(torch.randn(64, 1, 1, generator=generator))


REALISTIC = {
    "relu": lambda: torch.relu(feature_maps()),
    "gelu": lambda: torch.nn.functional.gelu(feature_maps()),
    "dropout": lambda: feature_maps() * (feature_maps() > -1),
    "mask": lambda: feature_maps() > 0,
    "indices": lambda: torch.nn.functional.max_pool2d(feature_maps(), 2, return_indices=True)[1],
    "tokens": lambda: torch.randint(0, 50257, (1 << 17,), generator=torch.Generator()),
}


@pytest.mark.parametrize("name", REALISTIC)
def test_a_sample_of_realistic_data_is_close_to_all_of_it(name):
    x = REALISTIC[name]().reshape(-1)
    p, exact = profile(x), profile_all(x)
    bits = x.view({1: torch.uint8, 4: torch.int32, 8: torch.int64}[x.itemsize])
    assert exact.zero_fraction == (bits == 0).double().mean().item()
    assert math.isclose(p.zero_fraction, exact.zero_fraction, abs_tol=0.05)
    assert math.isclose(p.repeat_fraction, exact.repeat_fraction, abs_tol=0.05)
    if exact.int_bits is not None:
        assert p.int_bits is not None
        assert math.isclose(p.int_bits, exact.int_bits, abs_tol=2)


@pytest.mark.parametrize("name", ["relu", "gelu", "dropout"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_a_sample_says_predicts_the_ratio(name, dtype):
    x = REALISTIC[name]().reshape(-1).to(dtype)
    for codec in ("expk", "zvc+expk", "zvc"):
        predicted, real = predicted_ratio(codec, profile(x)), get_codec(codec).encode(x).ratio
        assert math.isclose(predicted, real, rel_tol=0.1), codec


@pytest.mark.parametrize("name", ["indices", "tokens", "mask"])
def test_what_a_sample_of_integers_says_predicts_the_ratio(name):
    x = REALISTIC[name]().reshape(-1)
    predicted, real = predicted_ratio("bitpack", profile(x)), get_codec("bitpack").encode(x).ratio
    assert math.isclose(predicted, real, rel_tol=0.25), (predicted, real)


def test_a_period_in_the_data_does_not_fool_the_sample():
    x = torch.ones(1 << 18)
    x.view(16, -1)[:, :256] = 0  # where an evenly spaced sample would look
    assert profile(x).zero_fraction < 0.5


def test_values_are_not_changed():
    x = torch.randn(1000)
    before = x.clone()
    profile(x)
    assert torch.equal(x, before)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.complex64, torch.int64])
@pytest.mark.parametrize("n", [1, 4096, 100_003])
def test_a_late_profile_is_that_of_a_sample(dtype, n):
    x = torch.relu(torch.randn(n, generator=torch.Generator().manual_seed(1))).to(dtype)
    late, exact = LateProfile(x).get(), profile_all(x)
    assert late is not None
    assert (late.dtype, late.nbytes) == (exact.dtype, x.nbytes)
    assert late.zero_fraction == pytest.approx(exact.zero_fraction, abs=0.05)
    assert late.int_bits == exact.int_bits or late.int_bits == pytest.approx(exact.int_bits, abs=1)
