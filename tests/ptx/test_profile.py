"""The profiler's sampling kernel: its PTX in the interpreter against the CPU twin, by count."""

from __future__ import annotations

from functools import cache

import numpy as np
import pytest

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")

from bench.ptx.grid import run_blocks
from bench.ptx.kernel import Kernel
from bench.ptx.launch import Launch, Options
from bench.ptx.memory import Memory
from cswap_kernels.cuda import compiler
from cswap_kernels.cuda.profile import profile_kernel, profile_signature
from cswap_kernels.profile import N_COUNTS, profile_pieces

BLOCKS, THREADS = 2, 64
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


@cache
def compiled(word):
    """The kernel for words of so many bytes."""
    return Kernel(compiler.compile_ptx(profile_kernel(word), profile_signature(word), 90, THREADS))


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


@pytest.mark.sampled
@pytest.mark.parametrize(("pieces", "piece_words"), [(5, 64), (3, 100)])
@pytest.mark.parametrize("n", [1, 90, 3000])
@pytest.mark.parametrize("name", LAYOUTS)
def test_twins_agree(name, n, pieces, piece_words):
    word, layout = LAYOUTS[name]
    words = words_of(n, word, name)
    expected = np.zeros(N_COUNTS, np.int64)
    signed = np.array([v - (1 << 64) if v >= 1 << 63 else v for v in layout], np.int64)
    profile_pieces(words, pieces, piece_words, signed, expected)
    memory = Memory(1 << 22)
    x, counts = memory.allocate(words.nbytes), memory.allocate(8 * N_COUNTS, fill=0)
    x.data[:] = words.view(np.uint8)
    step = max(piece_words, n // pieces)
    args = [x.address, counts.address, n, pieces, piece_words, step, *layout]
    options = Options(races=False, max_steps=10**8)
    run_blocks(Launch(compiled(word), memory, BLOCKS, THREADS, args, options))
    np.testing.assert_array_equal(counts.data.view(np.int64), expected)
