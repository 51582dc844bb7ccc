"""``bitpack`` and ``expk``: the CUDA twins against the CPU twins, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from cswap_kernels.bitpack import bitpack_decode_cpu, bitpack_encode_cpu
from cswap_kernels.cuda.bitpack import bitpack_tile
from cswap_kernels.cuda.expk import expk_tile
from cswap_kernels.expk import expk_decode_cpu, expk_encode_cpu

EXPK = (expk_tile, expk_encode_cpu, expk_decode_cpu)
BITPACK = (bitpack_tile, bitpack_encode_cpu, bitpack_decode_cpu)


def sign_bit(word):
    return 1 << (8 * word - 1)


def integers(n, word, bits, signed, seed=0):
    """Words [n] that spread over ``bits`` bits, some below zero if signed."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 1 << bits, n, dtype=np.uint64, endpoint=False)
    if bits == 0:
        values[:] = 0
    start = (-(1 << bits) // 2 if signed else 3) % (1 << 8 * word)
    return (values + np.uint64(start)).astype(f"u{word}")


@pytest.mark.parametrize("signed", [False, True])
@pytest.mark.parametrize(
    ("word", "bits"), [(1, 1), (1, 3), (2, 7), (4, 10), (8, 13), (8, 47), (4, 0)]
)
def test_bitpack_twins_agree(twins, word, bits, signed):
    pair = twins(*BITPACK, word, tile=256)
    flip = sign_bit(word) if signed else 0
    words = integers(600, word, bits, signed)
    pair.agree(words, args=(flip,), expected=words)


@pytest.mark.parametrize("n", [1, 63, 65, 200])
def test_bitpack_tails(twins, n):
    pair = twins(*BITPACK, 1, tile=256)
    flags = (np.random.default_rng(n).random(n) < 0.5).astype(np.uint8)
    pair.agree(flags, args=(0,), expected=flags)
    pair.agree(np.ones(n, np.uint8), args=(0,), expected=np.ones(n, np.uint8))


def test_bitpack_full_range_is_raw_and_several_warps_agree(twins):
    pair = twins(*BITPACK, 8, tile=256, threads=128)
    words = integers(300, 8, 20, signed=True)
    words[:4] = [0, 2**64 - 1, 2**63, 2**63 - 1]
    pair.agree(words, args=(sign_bit(8),), expected=words, aligned=0)


def test_bitpack_hostile(twins):
    pair = twins(*BITPACK, 4, tile=256)
    words = integers(256, 4, 11, signed=False)
    hostile(pair, words, (0,))


def hostile(pair, words, args, count=40):
    """Both twins refuse, or both accept and agree, whatever single bit is flipped."""
    good = pair.encode_cpu(words, args)
    rng = np.random.default_rng(5)
    places = [*range(16 * 8), *rng.integers(16 * 8, good.size * 8, count)]
    for place in rng.choice(places, count, replace=False):
        bad = good.copy()
        bad[place >> 3] ^= 1 << (place & 7)
        expected, first = pair.decode_cpu(bad, words.size, args)
        back, status = pair.decode(bad, words.size, args)
        assert (first == -1) == (status == 0)
        if first == -1:
            assert np.array_equal(back, expected)


FLOATS = {"bf16": (2, 8, 7), "fp16": (2, 5, 10), "fp32": (4, 8, 23), "fp64": (8, 11, 52)}


def float_words(n, word, kind, zeros=0.0, spread=4, seed=0):
    """Words of normal values over some octaves, some of them zero."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) * 2.0 ** -rng.integers(0, spread + 1, n)
    x[rng.random(n) < zeros] = 0.0
    if kind == "bf16":
        return (x.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    return x.astype(f"f{word}").view(f"u{word}")


@pytest.mark.parametrize("k", [0, 3, 4])
@pytest.mark.parametrize("zeros", [0.0, 0.5])
@pytest.mark.parametrize("kind", FLOATS)
def test_expk_twins_agree(twins, kind, zeros, k):
    word, exponent_bits, mantissa_bits = FLOATS[kind]
    pair = twins(*EXPK, word, tile=256)
    words = float_words(600, word, kind, zeros)
    pair.agree(words, args=(exponent_bits, mantissa_bits, k), expected=words)


@pytest.mark.parametrize("n", [1, 63, 65])
def test_expk_tails_and_odd_values(twins, n):
    pair = twins(*EXPK, 4, tile=256, threads=64)
    words = np.full(n, 0x3F800000, np.uint32)
    words[::9], words[4::13] = 0x80000000, 3  # -0.0, a denormal
    words[8::17], words[5::19] = 0x7FC00001, 0x7F800000
    pair.agree(words, args=(8, 23, 0), expected=words, aligned=0)


def test_expk_small_exponents_and_many_escapes(twins):
    pair = twins(*EXPK, 2, tile=256, threads=128)
    words = float_words(512, 2, "bf16", 0.2, spread=40)
    words[:256] = words[:256] & 0x87FF  # exponents up to 15, zeros among them
    pair.agree(words, args=(8, 7, 0), expected=words)


def test_expk_hostile(twins):
    pair = twins(*EXPK, 2, tile=256)
    words = float_words(256, 2, "bf16", 0.3, spread=12)
    hostile(pair, words, (8, 7, 0))
