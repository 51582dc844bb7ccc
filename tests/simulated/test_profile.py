"""The profiler's sampling kernel: the CUDA twin against the CPU twin, count by count."""

from __future__ import annotations

import numpy as np
import pytest
from numba import cuda

from cswap_kernels.cuda.profile import profile_kernel
from cswap_kernels.profile import N_COUNTS, profile_pieces

SIGN = {1: 1 << 7, 2: 1 << 15, 4: 1 << 31, 8: 1 << 63}
LAYOUTS = {  # exponent bits, mantissa bits, flip, largest finite magnitude, NaN
    "fp32": (4, (8, 23, 0, 0x7F7FFFFF, -1)),
    "bf16": (2, (8, 7, 0, 0x7F7F, -1)),
    "fp64": (8, (11, 52, 0, 0x7FEFFFFFFFFFFFFF, -1)),
    "e5m2fnuz": (1, (5, 2, 0, 0x7F, 0x80)),
    "int64": (8, (0, 0, SIGN[8], 0, -1)),
    "uint8": (1, (0, 0, 0, 0, -1)),
    "other": (1, (-1, 0, 0, 0, -1)),
}


def words_of(n, word, name, seed=0):
    rng = np.random.default_rng(seed)
    if name == "fp32":
        x = rng.normal(size=n).astype(np.float32)
        x[::5], x[3::50], x[7::60] = 0.0, np.inf, np.nan
        return x.view(np.uint32)
    values = rng.integers(0, 1 << (8 * word), n, dtype=np.uint64, endpoint=False)
    if name == "int64":
        values = (rng.integers(-500, 500, n)).astype(np.int64).view(np.uint64)
    values[::4] = values[0]
    return values.astype(f"u{word}")


@pytest.mark.parametrize(("pieces", "piece_words"), [(5, 64), (3, 100)])
@pytest.mark.parametrize("n", [1, 90, 3000])
@pytest.mark.parametrize("name", LAYOUTS)
def test_twins_agree(name, n, pieces, piece_words):
    word, layout = LAYOUTS[name]
    words = words_of(n, word, name)
    expected = np.zeros(N_COUNTS, np.int64)
    signed = np.array([v - (1 << 64) if v >= 1 << 63 else v for v in layout], np.int64)
    profile_pieces(words, pieces, piece_words, signed, expected)
    counts = np.zeros(N_COUNTS, np.uint64)
    step = max(piece_words, n // pieces)
    exponent_bits, mantissa_bits, flip, largest, nan = layout
    cuda.jit(profile_kernel(word))[2, 64](
        words,
        counts,
        n,
        pieces,
        piece_words,
        step,
        np.int64(exponent_bits),
        np.int64(mantissa_bits),
        np.uint64(flip),
        np.int64(largest),
        np.int64(nan),
    )
    assert counts.tolist() == expected.tolist()
