"""``zfp``: the CUDA twin against zfpy's stream and the repository's reference, bit for bit."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from numba import cuda

from cswap_kernels.cuda.container import CONTROL_WORDS
from cswap_kernels.cuda.zfp import zfp_decode_kernel, zfp_encode_kernel
from cswap_kernels.cuda.zfp_blocks import read_plane, write_plane
from cswap_kernels.floats import BFLOAT16, IEEE, narrow_reference, widen_reference
from cswap_kernels.zfp import (
    SMALLEST,
    block_bits,
    stream_bytes,
    zfp_decode_reference,
    zfp_encode_reference,
)

KERNELS = {w: (cuda.jit(zfp_encode_kernel(w)), cuda.jit(zfp_decode_kernel(w))) for w in (2, 4, 8)}
GUARD = 0xC3


def encode(words, rate, kind=IEEE, *, grid=1, threads=32, aligned=1):
    """The payload of the CUDA twin, [nbytes] u8."""
    n, word = words.size, words.itemsize
    out = np.full(16 + words.nbytes + 16, GUARD, np.uint8)
    control, size = np.zeros(CONTROL_WORDS, np.uint64), np.zeros(1, np.uint64)
    bits = np.uint64(block_bits(rate, max(word, 4)))
    KERNELS[word][0][grid, threads](
        words, out, control, size, n, 0, aligned, bits, np.uint64(kind), np.uint64(0), np.uint64(0)
    )
    assert not control.any()
    nbytes = int(size[0])
    assert (out[max(nbytes, 16 + words.nbytes) :] == GUARD).all()
    return out[:nbytes].copy()


def decode(payload, n, word, rate, kind=IEEE, *, grid=1, threads=32, aligned=1):
    """(words [n], status) of the CUDA twin."""
    words = np.full(n + 8, GUARD, f"u{word}")
    status = np.zeros(1, np.uint32)
    data = np.zeros(-(-payload.size // 16) * 16, np.uint8)
    data[: payload.size] = payload
    bits = np.uint64(block_bits(rate, max(word, 4)))
    zero = np.uint64(0)
    KERNELS[word][1][grid, threads](
        data, payload.size, words, status, n, aligned, bits, np.uint64(kind), zero, zero
    )
    assert (words[n:] == GUARD).all()
    return words[:n].copy(), int(status[0])


def expect(words, rate, kind=IEEE):
    """(payload, words that come back) by the reference."""
    itemsize = max(words.itemsize, 4)
    bits = block_bits(rate, itemsize)
    x = words.view(np.float64) if words.itemsize == 8 else widen_reference(words, kind)
    x = np.where(np.abs(x) < SMALLEST[itemsize], 0, x).astype(x.dtype)
    stream = zfp_encode_reference(x, bits)
    x_hat = zfp_decode_reference(stream, x.dtype, x.size, bits)
    if words.itemsize == 2:
        words_hat = narrow_reference(x_hat, np.uint16, kind)
    else:
        words_hat = x_hat.view(words.dtype)
    head = struct.pack("<IIQ", 0, bits, words.size)
    return np.frombuffer(head + stream, np.uint8), words_hat


def assert_agrees(words, rate, kind=IEEE, **options):
    payload, words_hat = expect(words, rate, kind)
    assert payload.size < 16 + words.nbytes
    assert encode(words, rate, kind, **options).tobytes() == payload.tobytes()
    found, status = decode(payload, words.size, words.itemsize, rate, kind, **options)
    assert status == 0
    assert np.array_equal(found, words_hat)


def values_of(n, itemsize, kind, seed=0):
    """Blocks of every kind: noise, smooth, sparse, zero, tiny, large, of many magnitudes."""
    rng = np.random.default_rng(seed)
    x = rng.standard_normal(n)
    block = np.arange(n) // 4
    x = np.where(block % 8 == 1, 1 + 1e-3 * np.sin(np.arange(n) * 0.1), x)
    x = np.where(block % 8 == 2, x * (rng.random(n) < 0.3), x)
    x = np.where(block % 8 == 3, 0.0, x)
    x = np.where(block % 8 == 4, -3.7, x)
    x = np.where(block % 8 == 5, x * np.exp2(rng.integers(-12, 12, n)), x)
    if kind == "wide" and itemsize == 4:
        x = np.where(block % 8 == 6, x * 2.0**-96, np.where(block % 8 == 7, x * 2.0**122, x))
    elif kind == "wide":
        x = np.where(block % 8 == 6, x * 2.0**-960, np.where(block % 8 == 7, x * 2.0**1018, x))
    return x.astype(f"f{itemsize}")


@pytest.mark.parametrize("rate", [1, 3, 5, 8, 16, 31])
def test_float32(rate):
    assert_agrees(values_of(131, 4, "wide", rate).view(np.uint32), rate)


@pytest.mark.parametrize("rate", [1, 4, 9, 16, 33, 63])
def test_float64(rate):
    assert_agrees(values_of(131, 8, "wide", rate).view(np.uint64), rate)


@pytest.mark.parametrize("rate", [2, 7, 8, 15])
@pytest.mark.parametrize("kind", [IEEE, BFLOAT16])
def test_words_of_two_bytes(kind, rate):
    x = values_of(131, 4, "", rate)
    words = x.astype(np.float16).view(np.uint16) if kind == IEEE else x.view(np.uint32) >> 16
    assert_agrees(words.astype(np.uint16), rate, kind)


@pytest.mark.parametrize("n", [5, 6, 7, 8, 300])
def test_tails_blocks_of_several_warps_and_misaligned_words(n):
    words = values_of(n, 4, "wide", n).view(np.uint32)
    assert_agrees(words, 3, grid=2, threads=64, aligned=0)
    assert_agrees(words, 8, grid=2, threads=32)
    assert_agrees(values_of(n, 8, "wide", n).view(np.uint64), 10, threads=64, aligned=0)


def test_as_zfpy_writes_and_reads_them():
    zfpy = pytest.importorskip("zfpy")
    rng = np.random.default_rng(3)
    for itemsize, rate in ((4, 16), (4, 2), (4, 13), (8, 16), (8, 1), (8, 29)):
        x = values_of(100, itemsize, "", rate)
        bits = block_bits(rate, itemsize)
        stream = zfpy.compress_numpy(x, rate=bits / 4, write_header=False)
        assert encode(x.view(f"u{itemsize}"), rate)[16:].tobytes() == stream
        # Any bits are a stream, exponents apart that no encoder writes: those overflow.
        hostile = rng.integers(0, 256, stream_bytes(100, bits), dtype=np.uint8)
        head = np.frombuffer(struct.pack("<IIQ", 0, bits, 100), np.uint8)
        found, status = decode(np.concatenate([head, hostile]), 100, itemsize, rate)
        kind = zfpy.dtype_to_ztype(x.dtype)
        expected = zfpy._decompress(hostile.tobytes(), kind, [100], rate=bits / 4)
        assert status == 0
        assert np.array_equal(found.view(x.dtype), expected, equal_nan=True)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 2.0**126])
def test_one_value_that_zfp_cannot_take_keeps_all(value):
    x = values_of(600, 4, "", 5)
    x[477] = value
    words = x.view(np.uint32)
    head = struct.pack("<IIQ", 1, 32, 600)
    for options in ({}, {"grid": 3, "threads": 64, "aligned": 0}):
        payload = encode(words, 8, **options)
        assert payload.tobytes() == head + words.tobytes()
        found, status = decode(payload, 600, 4, 8, **options)
        assert status == 0
        assert np.array_equal(found, words)


@pytest.mark.parametrize(("n", "word", "rate"), [(0, 4, 8), (1, 4, 16), (2, 2, 3), (77, 4, 32)])
def test_what_would_not_shrink_is_kept(n, word, rate):
    words = values_of(n, 4, "").view(np.uint32).astype(f"u{word}")
    payload = encode(words, rate, grid=2)
    head = struct.pack("<IIQ", 1, block_bits(rate, 4), n)
    assert payload.tobytes() == head + words.tobytes()
    found, status = decode(payload, n, word, rate, grid=2)
    assert status == 0
    assert np.array_equal(found, words)


def test_signs_of_zero_denormals_and_tiny_values():
    x = np.zeros(64, np.float32)
    x[4:8] = [-0.0, 1e-45, -(2.0**-97), 2.0**-126]
    x[8:12] = [2.0**-96, -(2.0**-97), 1e-45, -0.0]
    x[12:16] = [1, -(2.0**-96), 1e-40, -1]
    assert_agrees(x.view(np.uint32), 16)


def test_a_damaged_header_or_size_is_refused():
    words = values_of(64, 4, "").view(np.uint32)
    payload = encode(words, 12)
    longer = np.concatenate([payload, payload])
    raw_stream = np.zeros(16 + stream_bytes(64, 160), np.uint8)  # no encoder keeps that
    raw_stream[:16] = np.frombuffer(struct.pack("<IIQ", 0, 160, 64), np.uint8)
    damaged = [(payload[:-1], 12), (payload[:16], 12), (payload[:15], 12), (longer, 12)]
    damaged.append((raw_stream, 40))
    for at in range(16):
        bad = payload.copy()
        bad[at] ^= 4
        damaged.append((bad, 12))
    for bad, rate in damaged:
        found, status = decode(bad, 64, 4, rate)
        assert status == 1
        assert (found == GUARD).all()
    for n in (60, 65):
        assert decode(payload, n, 4, 12)[1] == 1


def test_planes_are_read_as_written():
    for n in range(5):
        for plane in range(16):
            entry = int(write_plane(np.uint32(plane), np.uint32(n)))
            code, length = entry & 255, entry >> 8
            back = int(read_plane(np.uint32(code), np.uint32(length), np.uint32(n)))
            assert (back & 15, back >> 8) == (plane, length)
            assert length <= 7
