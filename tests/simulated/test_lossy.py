"""The lossy formats: the CUDA twins against the CPU twins, byte for byte."""

from __future__ import annotations

import numpy as np
import pytest

from cswap_kernels.cast import cast_decode_cpu, cast_encode_cpu
from cswap_kernels.cuda.cast import cast_tile
from cswap_kernels.cuda.fp8 import fp8_tile, mxfp8_tile
from cswap_kernels.cuda.int4 import int4_tile
from cswap_kernels.cuda.int8 import int8_tile
from cswap_kernels.floats import BFLOAT16, IEEE
from cswap_kernels.fp8 import fp8_decode_cpu, fp8_encode_cpu
from cswap_kernels.int4 import int4_decode_cpu, int4_encode_cpu
from cswap_kernels.int8 import int8_decode_cpu, int8_encode_cpu
from cswap_kernels.mxfp8 import mxfp8_decode_cpu, mxfp8_encode_cpu

FORMATS = {
    "int4": (int4_tile, int4_encode_cpu, int4_decode_cpu),
    "fp8": (fp8_tile, fp8_encode_cpu, fp8_decode_cpu),
    "mxfp8": (mxfp8_tile, mxfp8_encode_cpu, mxfp8_decode_cpu),
    "int8": (int8_tile, int8_encode_cpu, int8_decode_cpu),
}
KEY = (0x123456789ABCDEF0, (7 << 32) | 5)
"""Seed and stream of the formats that round at random."""

KINDS = [(2, BFLOAT16), (2, IEEE), (4, IEEE), (8, IEEE)]


def words_of(values, word, kind):
    """Float64 values [n] as words."""
    if (word, kind) == (2, BFLOAT16):
        return (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
    with np.errstate(over="ignore", under="ignore"):
        return values.astype(f"f{word}").view(f"u{word}")


def values(n, seed=0):
    """Normal values with a wide range of scales, zeros of both signs, denormals."""
    rng = np.random.default_rng(seed)
    x = rng.normal(size=n) * 2.0 ** rng.integers(-6, 6, n)
    x[::11], x[5::37], x[7::41] = 0.0, -0.0, 3e-40
    return x


@pytest.fixture(params=FORMATS)
def name(request):
    return request.param


@pytest.mark.parametrize(("word", "kind"), KINDS)
@pytest.mark.parametrize("n", [1, 127, 700])
def test_twins_agree(twins, name, word, kind, n):
    pair = twins(*FORMATS[name], word, tile=512)
    pair.agree(words_of(values(n), word, kind), args=(kind, *KEY))


def test_extremes(twins, name):
    pair = twins(*FORMATS[name], 4, tile=256)
    cases = np.zeros((12, 256), np.float32)
    cases[1] = 1.5
    cases[2] = -7.25
    cases[3, ::2], cases[3, 1::2] = 3.4e38, -3.4e38  # too large: raw
    cases[4, 3] = np.nan  # raw
    cases[5, 200] = np.inf  # raw
    cases[6] = np.float32(1e-42)  # denormals only
    cases[7] = np.linspace(-1, 1, 256)
    cases[8] = 255
    cases[8, ::5], cases[8, 1::5] = 1e-3, -1e-3  # less than half a step; all to one side of 0
    cases[9] = -cases[8]
    cases[10] = np.maximum(values(256, 2), 0)  # one side of 0 only
    cases[11] = -cases[10]
    pair.agree(cases.reshape(-1).view(np.uint32), args=(IEEE, *KEY))


def test_several_warps_and_misaligned_memory(twins, name):
    pair = twins(*FORMATS[name], 2, tile=512, threads=128)
    pair.agree(words_of(values(600, 1), 2, BFLOAT16), args=(BFLOAT16, *KEY), aligned=0)


def test_a_segment_of_another_length_is_refused(twins, name):
    pair = twins(*FORMATS[name], 4, tile=256)
    payload = pair.encode_cpu(words_of(values(256), 4, IEEE), (IEEE, *KEY))
    directory = payload[:8].view(np.uint32)
    for change in (-1, 1, -16):
        bad = payload.copy()
        bad[:8].view(np.uint32)[1] = int(directory[1]) + change
        assert pair.decode_cpu(bad, 256, (IEEE, *KEY))[1] == 0
        assert pair.decode(bad, 256, (IEEE, *KEY))[1] == 1


@pytest.mark.parametrize("target", [BFLOAT16, IEEE])
@pytest.mark.parametrize("word", [4, 8])
def test_casts_agree(twins, word, target):
    pair = twins(cast_tile, cast_encode_cpu, cast_decode_cpu, word)
    x = values(600)
    x[40:44] = [65519.9, -65503.9, 2.0**-24, 1.5 * 2.0**-25]
    x[300] = 65520.0  # raw as float16
    x[500] = np.inf  # raw
    pair.agree(words_of(x, word, IEEE), args=(IEEE, target))
