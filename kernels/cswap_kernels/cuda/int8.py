"""``int8`` on CUDA: the format of cswap_kernels/int8.py.

measure: a warp per group of 128 values, four per lane: the range of each group, to tmp
write: a thread per group: scale, reciprocal, zero point; then four codes per thread
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int32, uint32, uint64

from cswap_kernels.cuda.floats import MAGNITUDE
from cswap_kernels.cuda.fours import (
    WHOLE,
    bits_of_four,
    exponents_of,
    four_access,
    largest_of,
    magnitudes,
    quad_of,
    raised,
    raw_test,
)
from cswap_kernels.cuda.primitives import (
    advance,
    as_u32,
    as_u64,
    bits_f32,
    f32_bits,
    greater,
    rint,
    signed,
    unsigned,
)
from cswap_kernels.cuda.quads import halves, pair
from cswap_kernels.cuda.warps import (
    padded,
    warp_max,
    warp_max_u32,
    zero_bytes,
)
from cswap_kernels.cuda.zvc import zero_rest

if TYPE_CHECKING:
    from cswap_kernels.cuda.container import TileFunctions

LOG_GROUP = 7
LEAST_SCALE = 0x00800000
RANGES = 128
"""Where the groups' ranges begin in tmp: a u64 for each of up to 64, behind `RAW_WORDS`."""

SIGN = 0x80000000
ROUNDER = 0x4B400000
"""Bits of 1.5 * 2**23. Added to a number of up to 2**22, it rounds it: ties to even."""


@cuda.jit(device=True)
def scale_of(hi, lo):
    """(bits of the scale, its reciprocal, zero point) of a group.

    hi: bits (u32) of the largest value, 0 counted in; lo: of the smallest, if its sign is set.
    """
    low = bits_f32(lo) if signed(lo) < int32(0) else float32(0.0)
    spread = float32(bits_f32(hi) - low)
    bits = f32_bits(float32(spread / float32(255.0)))
    if bits < uint32(LEAST_SCALE):
        bits = uint32(LEAST_SCALE)
    bits = uint32(uint32(bits + uint32(255)) & uint32(0xFFFFFF00))
    inverse = float32(float32(1.0) / bits_f32(bits))
    zero = int32(rint(float32(float32(-low) * inverse)))
    return bits, inverse, zero


@cuda.jit(device=True)
def code_of(value, inverse, zero):
    """The code (u32) of a value: at least one step away from z if it is not 0."""
    least = float32(1.0) if value != float32(0.0) else float32(0.0)
    size = greater(float32(abs(float32(value * inverse))), least)
    steps = bits_f32(uint32(f32_bits(size) | uint32(f32_bits(value) & uint32(SIGN))))
    rounded = signed(f32_bits(float32(steps + bits_f32(uint32(ROUNDER)))))
    q = int32(int32(rounded - int32(ROUNDER)) + zero)
    return unsigned(int32(min(int32(max(q, int32(0))), int32(255))))


@cuda.jit(device=True)
def groups_of(n):
    """Groups of n words."""
    return int32((n + int32(127)) >> int32(LOG_GROUP))


@cuda.jit(device=True)
def put_scales(ranges, n, scales):
    """Write scales with zero points, and put (reciprocal, zero point) in the place of ranges.

    Ends with a syncthreads.
    """
    group = int32(cuda.threadIdx.x)
    while group < groups_of(n):
        hi, lo = halves(uint64(ranges[group]))
        scale, inverse, zero = scale_of(hi, lo)
        scales[group] = uint32(scale | unsigned(zero))
        ranges[group] = pair(f32_bits(inverse), unsigned(zero))
        group = int32(group + int32(cuda.blockDim.x))
    cuda.syncthreads()


def int8_tile(word: int, as_words: Any) -> TileFunctions:
    """(measure, write, decode) for words of ``word`` bytes; contract: container.py."""
    load, store = four_access(word)
    is_raw = raw_test(load)

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        zero_rest(x, n)
        ranges, fours = as_u64(advance(tmp, RANGES)), int32(groups_of(n) << int32(5))
        top, exponents, i = int32(0), uint32(0), int32(cuda.threadIdx.x)
        while i < fours:
            bits = bits_of_four(load(x, i, int32(a0)))
            hi = int32(max(int32(max(signed(bits[0]), signed(bits[1]))), int32(0)))
            hi = int32(max(hi, int32(max(signed(bits[2]), signed(bits[3])))))
            exponents = uint32(exponents + exponents_of(magnitudes(bits)))
            hi, lo = warp_max(hi), warp_max_u32(largest_of(bits))
            top = int32(max(top, int32(max(hi, signed(uint32(lo & uint32(MAGNITUDE)))))))
            ranges[int32(i >> int32(5))] = pair(unsigned(hi), lo)  # the same of all lanes
            i = int32(i + int32(cuda.blockDim.x))
        raw = is_raw(x, n, int32(a0), top, signed(exponents), tmp)
        nbytes = int32(padded(int32(groups_of(n) << int32(2))) + n)
        return int32(-1) if raw else nbytes, (int32(0),)

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        ranges, end = as_u64(advance(tmp, RANGES)), int32(groups_of(n) << int32(2))
        zero_bytes(dst, end, padded(end))
        put_scales(ranges, n, as_u32(dst))
        codes, i = as_u32(advance(dst, padded(end))), int32(cuda.threadIdx.x)
        while i < int32(groups_of(n) << int32(5)):
            inverse, zero = halves(uint64(ranges[int32(i >> int32(5))]))
            inverse, zero = bits_f32(inverse), signed(zero)
            a, b, c, d = load(x, i, int32(a0))
            a, b = code_of(a, inverse, zero), code_of(b, inverse, zero)
            codes[i] = quad_of(a, b, code_of(c, inverse, zero), code_of(d, inverse, zero))
            i = int32(i + int32(cuda.blockDim.x))
        if n & int32(127):  # codes were written behind the end
            cuda.syncthreads()

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        start = padded(int32(groups_of(n) << int32(2)))
        if nbytes != int32(start + n):
            return int32(-1)
        scales, codes = as_u32(src), as_u32(advance(src, start))
        i = int32(cuda.threadIdx.x)
        while int32(i << int32(2)) < n:
            entry = uint32(scales[int32(i >> int32(5))])
            scale = bits_f32(uint32(entry & uint32(0xFFFFFF00)))
            base = bits_f32(uint32(uint32(WHOLE) | uint32(entry & uint32(255))))  # 2**23 + z
            a, b, c, d = raised(uint32(codes[i]))
            a, b = float32(float32(a - base) * scale), float32(float32(b - base) * scale)
            c, d = float32(float32(c - base) * scale), float32(float32(d - base) * scale)
            store(x, i, int32(a0), a, b, c, d)
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return measure, write, decode
