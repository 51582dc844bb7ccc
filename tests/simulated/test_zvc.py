"""``zvc``, ``csr``, ``rle``: the CUDA twins against the CPU twins, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from cswap_kernels.csr import csr_decode_cpu, csr_encode_cpu
from cswap_kernels.cuda.csr import csr_tile
from cswap_kernels.cuda.rle import rle_tile
from cswap_kernels.cuda.zvc import zvc_tile
from cswap_kernels.rle import rle_decode_cpu, rle_encode_cpu
from cswap_kernels.zvc import zvc_decode_cpu, zvc_encode_cpu

WORDS = (1, 2, 4, 8)


def sparse(n, word, zeros, seed=0):
    rng = np.random.default_rng(seed)
    values = rng.integers(1, 1 << (8 * word), n, dtype=np.uint64, endpoint=False)
    return (values * (rng.random(n) >= zeros)).astype(f"u{word}")


@pytest.fixture(params=WORDS)
def zvc(request, twins):
    return twins(zvc_tile, zvc_encode_cpu, zvc_decode_cpu, request.param)


@pytest.mark.parametrize("n", [1, 33, 300])
def test_twins_agree(zvc, n):
    words = sparse(n, zvc.word, 0.6)
    zvc.agree(words, expected=words)


@pytest.mark.parametrize("zeros", [0.0, 1.0])
def test_all_zero_and_no_zero(twins, zeros):
    zvc = twins(zvc_tile, zvc_encode_cpu, zvc_decode_cpu, 2)
    words = sparse(200, 2, zeros)
    zvc.agree(words, expected=words)


def test_negative_zero_denormals_and_nan_payloads_survive(twins):
    zvc = twins(zvc_tile, zvc_encode_cpu, zvc_decode_cpu, 4)
    words = np.zeros(300, np.uint32)
    words[::7] = [0x80000000, 1, 0x7FC00001, 0xFFFFFFFF, 0x7F800000, 2, 3] * 6 + [9]
    zvc.agree(words, expected=words)


def test_misaligned_memory_and_fixed_strides(twins):
    zvc = twins(zvc_tile, zvc_encode_cpu, zvc_decode_cpu, 2)
    words = sparse(600, 2, 0.5)
    zvc.agree(words, expected=words, aligned=0)
    payload = zvc.encode(words, stride=zvc.tile * 2)
    assert payload.size == 48 + 5 * zvc.tile * 2
    assert np.array_equal(zvc.decode_cpu(payload, 600)[0], words)
    assert np.array_equal(zvc.decode(payload, 600, aligned=0)[0], words)


def test_a_block_of_four_warps(twins):
    zvc = twins(zvc_tile, zvc_encode_cpu, zvc_decode_cpu, 4, threads=128)
    words = sparse(150, 4, 0.5)
    zvc.agree(words, expected=words)


def test_hostile_segments_are_refused_and_stay_in_bounds(twins):
    zvc = twins(zvc_tile, zvc_encode_cpu, zvc_decode_cpu, 4)
    words = sparse(300, 4, 0.6)
    good = zvc.encode_cpu(words)
    rng = np.random.default_rng(1)
    for _ in range(12):
        bad = good.copy()
        bad[rng.integers(bad.size)] ^= 1 << rng.integers(8)
        _, first = zvc.decode_cpu(bad, 300)
        _, status = zvc.decode(bad, 300)
        assert (first == -1) == (status == 0)


CSR = (csr_tile, csr_encode_cpu, csr_decode_cpu)
RLE = (rle_tile, rle_encode_cpu, rle_decode_cpu)
OTHERS = {"csr": CSR, "rle": RLE}


def runs(n, word, length, seed=0):
    """Words [n] in runs of about that length, some of them zeros."""
    rng = np.random.default_rng(seed)
    values = rng.integers(0, 4, n).astype(f"u{word}")
    return values[np.cumsum(rng.random(n) < 1 / length) % n]


@pytest.mark.parametrize("word", WORDS)
@pytest.mark.parametrize("n", [1, 65, 600])
@pytest.mark.parametrize("name", OTHERS)
def test_the_others_agree(twins, name, n, word):
    pair = twins(*OTHERS[name], word, tile=512)
    words = sparse(n, word, 0.93) if name == "csr" else runs(n, word, 40)
    pair.agree(words, expected=words)


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_on_dense_words_zeros_and_several_warps(twins, name):
    pair = twins(*OTHERS[name], 2, tile=512, threads=128)
    words = np.concatenate([sparse(512, 2, 0.0), np.zeros(512, np.uint16), sparse(300, 2, 0.97)])
    words[600:900] = 5
    pair.agree(words, expected=words, aligned=0)


@pytest.mark.parametrize("name", OTHERS)
def test_the_others_refuse_what_is_hostile(twins, name):
    pair = twins(*OTHERS[name], 4, tile=512)
    words = sparse(500, 4, 0.95) if name == "csr" else runs(500, 4, 30)
    good = pair.encode_cpu(words)
    rng = np.random.default_rng(1)
    for place in rng.integers(0, min(good.size, 16 + 160) * 8, 60).tolist():
        bad = good.copy()
        bad[place >> 3] ^= 1 << (place & 7)
        expected, first = pair.decode_cpu(bad, words.size)
        back, status = pair.decode(bad, words.size)
        assert (first == -1) == (status == 0)
        if first == -1:
            assert np.array_equal(back, expected)
