"""Bit planes on CUDA: fields of a few bits per word, as cswap_kernels/planes.py spreads them."""

from __future__ import annotations

from numba import cuda, int32

from cswap_kernels.cuda.warps import padded


@cuda.jit(device=True)
def whole_groups(n):
    """The next multiple of 64."""
    return int32((n + int32(63)) & int32(-64))


@cuda.jit(device=True)
def parts_bytes(n, bits):
    """Bytes of the parts of a field of ``bits`` (0 to 7) bits of n words."""
    m, total = whole_groups(n), int32(0)
    if bits & int32(4):
        total = int32(total + padded(int32(m >> int32(1))))
    if bits & int32(2):
        total = int32(total + padded(int32(m >> int32(2))))
    if bits & int32(1):
        total = int32(total + padded(int32(m >> int32(3))))
    return total


@cuda.jit(device=True)
def fill_behind(x, n, value):
    """Let the words of x from n on, up to a multiple of 64, be a value. Ends with a syncthreads."""
    if n & int32(63):
        i = int32(n + int32(cuda.threadIdx.x))
        while i < whole_groups(n):
            x[i] = value
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
