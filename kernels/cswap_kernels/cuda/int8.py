"""``int8`` on CUDA: the format of cswap_kernels/int8.py; groups.py has all but a group."""

from __future__ import annotations

from numba import cuda, float32, int32, uint32, uint64

from cswap_kernels.cuda.floats import MAGNITUDE
from cswap_kernels.cuda.fours import WHOLE, largest_of, quad_of, scaled
from cswap_kernels.cuda.groups import group_tile, groups_of
from cswap_kernels.cuda.primitives import (
    as_u32,
    bits_f32,
    f32_bits,
    greater,
    rint,
    signed,
    unsigned,
)
from cswap_kernels.cuda.quads import halves, pair
from cswap_kernels.cuda.warps import warp_max, warp_max_u32
from cswap_kernels.int8 import GROUP

LEAST_SCALE = 0x00800000
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
def see(bits, sizes, i, numbers):
    """The group's range as (hi, lo), see `scale_of`."""
    hi = int32(max(int32(max(signed(bits[0]), signed(bits[1]))), int32(0)))
    hi = warp_max(int32(max(hi, int32(max(signed(bits[2]), signed(bits[3]))))))
    lo = warp_max_u32(largest_of(bits))
    numbers[int32(i >> int32(5))] = pair(unsigned(hi), lo)  # the same of all lanes
    return int32(max(hi, signed(uint32(lo & uint32(MAGNITUDE)))))


@cuda.jit(device=True)
def put_scales(numbers, n, dst):
    """Write scales with zero points, and put (reciprocal, zero point) in the place of ranges."""
    scales, group = as_u32(dst), int32(cuda.threadIdx.x)
    while group < groups_of(n):
        hi, lo = halves(uint64(numbers[group]))
        scale, inverse, zero = scale_of(hi, lo)
        scales[group] = uint32(scale | unsigned(zero))
        numbers[group] = pair(f32_bits(inverse), unsigned(zero))
        group = int32(group + int32(cuda.blockDim.x))
    cuda.syncthreads()
    return False


@cuda.jit(device=True)
def quad(four, i, numbers, dst, n):
    """The codes of four values."""
    inverse, zero = halves(uint64(numbers[int32(i >> int32(5))]))
    inverse, zero = bits_f32(inverse), signed(zero)
    a, b = code_of(four[0], inverse, zero), code_of(four[1], inverse, zero)
    return quad_of(a, b, code_of(four[2], inverse, zero), code_of(four[3], inverse, zero))


@cuda.jit(device=True)
def four(entry, quad):
    """The values of four codes."""
    scale = bits_f32(uint32(entry & uint32(0xFFFFFF00)))
    base = bits_f32(uint32(uint32(WHOLE) | uint32(entry & uint32(255))))  # 2**23 + z
    return scaled(quad, base, scale)


int8_tile = group_tile(GROUP, 4, see, quad, four, put_scales)
