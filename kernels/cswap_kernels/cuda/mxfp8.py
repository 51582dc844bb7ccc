"""``mxfp8`` on CUDA: the format of cswap_kernels/mxfp8.py; groups.py has all but a group."""

from __future__ import annotations

from numba import cuda, float32, int32, uint8, uint32

from cswap_kernels.cuda.fours import bits_of_four, largest_of, magnitudes
from cswap_kernels.cuda.fp8 import quad_of_e4m3, scaled
from cswap_kernels.cuda.groups import group_tile
from cswap_kernels.cuda.primitives import FULL, bits_f32, greater, lesser, signed, unsigned
from cswap_kernels.mxfp8 import E_MAX, GROUP


@cuda.jit(device=True)
def e8m0(c):
    """The float32 of an E8M0 scale (u32 of 8 bits): 2**(c - 127), NaN for 255."""
    bits = uint32(c << uint32(23))
    if c == uint32(0):
        bits = uint32(0x00400000)  # 2**-127 is not a normal number
    if c == uint32(255):
        bits = uint32(0x7FC00000)
    return bits_f32(bits)


@cuda.jit(device=True)
def see(bits, sizes, i, numbers):
    """The largest magnitude; groups need not be measured."""
    return signed(largest_of(sizes))


@cuda.jit(device=True)
def cut(x):
    """A float32 cut to -448 to 448, the range of E4M3."""
    return lesser(greater(x, float32(-448.0)), float32(448.0))


@cuda.jit(device=True)
def quad(four, i, numbers, dst, n):
    """The codes of four values. The group's first lane writes the scale."""
    largest = largest_of(magnitudes(bits_of_four(four)))
    for k in range(3):  # over the eight lanes that have a group together
        other = unsigned(int32(cuda.shfl_xor_sync(FULL, signed(largest), int32(4 >> k))))
        largest = uint32(max(largest, other))
    scale = int32(max(int32(signed(uint32(largest >> uint32(23))) - int32(E_MAX)), int32(0)))
    group = int32(i >> int32(3))
    if int32(i & int32(7)) == int32(0) and int32(group << int32(5)) < n:
        dst[group] = uint8(scale)
    inverse = bits_f32(unsigned(int32(int32(int32(254) - scale) << int32(23))))
    a, b = cut(float32(four[0] * inverse)), cut(float32(four[1] * inverse))
    c, d = cut(float32(four[2] * inverse)), cut(float32(four[3] * inverse))
    return quad_of_e4m3(a, b, c, d)


@cuda.jit(device=True)
def four(entry, quad):
    """The values of four codes."""
    return scaled(quad, e8m0(entry))


mxfp8_tile = group_tile(GROUP, 1, see, quad, four)
