"""Roundings that the CUDA kernels do without the instruction for them, in the interpreter."""

from __future__ import annotations

import numpy as np
import pytest

pytest.importorskip("numba.cuda.extending", reason="numba-cuda is not installed")

from numba import cuda, float32, int32, types

from bench.ptx.grid import run_blocks
from bench.ptx.kernel import Kernel
from bench.ptx.launch import Launch, Options
from bench.ptx.memory import Memory
from cswap_kernels.cuda import compiler
from cswap_kernels.cuda.fp8 import quad_of_e4m3, quotient
from cswap_kernels.fp8 import to_e4m3_reference

THREADS = 256
F32, U32 = types.CPointer(types.float32), types.CPointer(types.uint32)


def quads(x, out, n):
    i = int32(cuda.threadIdx.x)
    while i < n:
        at = int32(i << int32(2))
        a, b = x[at], x[int32(at + int32(1))]
        out[i] = quad_of_e4m3(a, b, x[int32(at + int32(2))], x[int32(at + int32(3))])
        i = int32(i + int32(cuda.blockDim.x))


def quotients(x, scale, out, n):
    i = int32(cuda.threadIdx.x)
    while i < n:
        s = scale[i]
        out[i] = quotient(x[i], s, float32(float32(1.0) / s))
        i = int32(i + int32(cuda.blockDim.x))


def run(function, signature, inputs, dtype, n):
    """[n] results of one block."""
    memory = Memory(sum(a.nbytes for a in inputs) + (1 << 22))
    addresses = []
    for values in inputs:
        made = memory.allocate(values.nbytes, fill=0)
        made.data[:] = values.view(np.uint8)
        addresses.append(made.address)
    out = memory.allocate(n * dtype.itemsize)
    kernel = Kernel(compiler.compile_ptx(function, signature, 90, THREADS))
    options = Options(races=False, max_steps=10**8)
    run_blocks(Launch(kernel, memory, 1, THREADS, [*addresses, out.address, n], options))
    return out.data.view(dtype).copy()


def test_every_rounding_to_e4m3():
    """All upper halves of a float32 up to 464, with lower halves on both sides of every middle.

    A middle between two E4M3 numbers has five bits of mantissa at most. Between middles the
    function is monotonic, as a sum is: so these stand for all.
    """
    upper = np.arange(0x43E8, dtype=np.uint32) << 16
    lower = np.array([0, 1, 0x7FFF, 0x8000, 0xFFFF], np.uint32)
    bits = (upper[:, None] | lower).ravel()
    x = np.concatenate([bits, bits | np.uint32(1 << 31)]).view(np.float32)
    x = x[: x.size // 4 * 4]
    signature = types.void(F32, U32, types.int32)
    found = run(quads, signature, [x], np.dtype(np.uint32), x.size // 4).view(np.uint8)
    np.testing.assert_array_equal(found, to_e4m3_reference(x))


def test_quotients_are_the_nearest():
    rng, n = np.random.default_rng(0), 1 << 16
    mantissas = rng.integers(0, 1 << 23, n, dtype=np.uint32)
    mantissas[::3] |= np.uint32(0x7FFF00)  # close to the next power of two
    mantissas[1::3] &= np.uint32(0x0000FF)
    exponents = rng.integers(127 - 80, 127 + 117, n).astype(np.uint32)
    scale = (exponents << 23 | mantissas).view(np.float32)
    wanted = rng.normal(size=n) * 2.0 ** rng.integers(-10, 7, n)
    middles = (rng.integers(16, 32, n) + 0.5) / 2**4  # of two E4M3 numbers
    wanted[::2] = (middles * (1 + rng.integers(-2, 3, n) * 2.0**-23))[::2]
    x = (np.clip(wanted, -448, 448) * scale.astype(np.float64)).astype(np.float32)
    x[:2] = 0.0, -0.0
    signature = types.void(F32, F32, F32, types.int32)
    found = run(quotients, signature, [x, scale], np.dtype(np.float32), n)
    np.testing.assert_array_equal(found.view(np.uint32), (x / scale).view(np.uint32))
