"""``fp8`` on CUDA: the format of cswap_kernels/fp8.py; groups.py has all but a group."""

from __future__ import annotations

from numba import cuda, float32, int32, uint32, uint64

from cswap_kernels.cuda.fours import largest_of, quad_of, top_bytes
from cswap_kernels.cuda.groups import group_tile, groups_of
from cswap_kernels.cuda.primitives import as_u32, bits_f32, f32_bits, fused, signed, unsigned
from cswap_kernels.cuda.quads import FLAGS, LOW, ONES, halves, pair
from cswap_kernels.cuda.warps import warp_max_u32
from cswap_kernels.floats import E4M3_LEAST, E4M3_SHIFT
from cswap_kernels.fp8 import GROUP

LEAST_SCALE = 0x00800000
SMALL_SCALE = 0x17800000
"""Bits of 2**-80. Below, the remainder of a division may be no float32."""

EXPONENT = 0x7F800000
UP = (E4M3_SHIFT << 23) + (-(E4M3_LEAST + (E4M3_SHIFT << 23) >> E4M3_SHIFT) & 0xFF)
"""20 octaves; and the lowest byte by which the smallest normal number's code becomes 8."""

WIDEN = 0x7B800000
"""Bits of 2**120: the bias of float32's exponents less that of E4M3's."""


@cuda.jit(device=True)
def to_e4m3(x):
    """A u32 whose lowest byte is the E4M3 code, without sign, nearest to a float32 below 464.

    Ties go to even. Added to a power of two that is 2**20 times x's own, at least that of the
    smallest normal number, x is rounded to a multiple of its last bit in E4M3. The lowest bits of
    the sum count these; those of the power are an offset that makes the exponent's part right.
    """
    own = uint32(f32_bits(x) & uint32(EXPONENT))
    power = uint32(max(uint32(own + uint32(UP)), uint32(E4M3_LEAST + UP)))
    total = f32_bits(float32(float32(abs(x)) + bits_f32(power)))
    return uint32(total + uint32(power >> uint32(E4M3_SHIFT)))


@cuda.jit(device=True)
def quad_of_e4m3(a, b, c, d):
    """The quad of the E4M3 codes nearest to four float32 between -464 and 464."""
    codes = quad_of(to_e4m3(a), to_e4m3(b), to_e4m3(c), to_e4m3(d))
    signs = top_bytes(f32_bits(a), f32_bits(b), f32_bits(c), f32_bits(d))
    return uint32(uint32(codes & uint32(LOW)) | uint32(signs & uint32(FLAGS)))


@cuda.jit(device=True)
def is_any_nan(quad):
    """Whether one of four E4M3 codes is NaN."""
    return uint32(uint32(uint32(quad & uint32(LOW)) + uint32(ONES)) & uint32(FLAGS)) != uint32(0)


@cuda.jit(device=True)
def from_e4m3(c):
    """The float32 of an E4M3 code in the highest byte of a u32; exact, and 480 for NaN.

    Shifted to where float32 has exponent and mantissa, the code is that of 2**-120 times as much.
    """
    moved = unsigned(int32(signed(uint32(c & uint32(0xFF000000))) >> int32(4)))
    small = bits_f32(uint32(moved & uint32(0x87F00000)))
    return float32(small * bits_f32(uint32(WIDEN)))


@cuda.jit(device=True)
def four_from_e4m3(quad):
    """Four float32 of their E4M3 codes."""
    a, b = from_e4m3(uint32(quad << uint32(24))), from_e4m3(uint32(quad << uint32(16)))
    c, d = from_e4m3(uint32(quad << uint32(8))), from_e4m3(quad)
    if is_any_nan(quad):  # of a damaged payload
        a, b = or_nan(a), or_nan(b)
        c, d = or_nan(c), or_nan(d)
    return a, b, c, d


@cuda.jit(device=True)
def or_nan(x):
    """A float32, but NaN in the place of 480, with x's sign."""
    nan = bits_f32(uint32(uint32(f32_bits(x) & uint32(0x80000000)) | uint32(0x7FC00000)))
    return nan if abs(x) == float32(480.0) else x


@cuda.jit(device=True)
def quotient(x, scale, inverse):
    """The float32 x / scale, to the nearest, of a scale from 2**-80 on and |x| up to 512 times it.

    ``inverse`` is 1 / scale to the nearest. The first correction leaves an error below one unit in
    the last place; then the second gives the nearest (Markstein 1990). Quotients so
    small that remainders are not exact have the E4M3 code 0 in either case, with the sign of x.
    """
    q = float32(x * inverse)
    q = fused(float32(-fused(q, scale, float32(-x))), inverse, q)
    return fused(float32(-fused(q, scale, float32(-x))), inverse, q)


@cuda.jit(device=True)
def see(bits, sizes, i, numbers):
    """The group's largest magnitude."""
    largest = warp_max_u32(largest_of(sizes))
    numbers[int32(i >> int32(5))] = uint64(largest)  # the same of all lanes
    return signed(largest)


@cuda.jit(device=True)
def put_scales(numbers, n, dst):
    """Write scales, and put (scale, reciprocal) in the place of largest magnitudes.

    Whether one of them is too small for `quotient`.
    """
    scales, group, small = as_u32(dst), int32(cuda.threadIdx.x), int32(0)
    while group < groups_of(n):
        top, _ = halves(uint64(numbers[group]))
        bits = f32_bits(float32(bits_f32(top) / float32(448.0)))
        bits = uint32(max(bits, uint32(LEAST_SCALE)))
        scales[group] = bits
        if bits < uint32(SMALL_SCALE):
            small = int32(1)
        numbers[group] = pair(bits, f32_bits(float32(float32(1.0) / bits_f32(bits))))
        group = int32(group + int32(cuda.blockDim.x))
    return cuda.syncthreads_or(small)


@cuda.jit(device=True)
def quad(four, i, numbers, dst, n):
    """The codes of four values, none of whose scales is too small for `quotient`."""
    scale, inverse = halves(uint64(numbers[int32(i >> int32(5))]))
    scale, inverse = bits_f32(scale), bits_f32(inverse)
    a, b = quotient(four[0], scale, inverse), quotient(four[1], scale, inverse)
    c, d = quotient(four[2], scale, inverse), quotient(four[3], scale, inverse)
    return quad_of_e4m3(a, b, c, d)


@cuda.jit(device=True)
def divided_quad(four, i, numbers, dst, n):
    """The codes of four values."""
    scale, _ = halves(uint64(numbers[int32(i >> int32(5))]))
    scale = bits_f32(scale)
    a, b = float32(four[0] / scale), float32(four[1] / scale)
    return quad_of_e4m3(a, b, float32(four[2] / scale), float32(four[3] / scale))


@cuda.jit(device=True)
def scaled(quad, scale):
    """The values of four codes."""
    a, b, c, d = four_from_e4m3(quad)
    return float32(a * scale), float32(b * scale), float32(c * scale), float32(d * scale)


@cuda.jit(device=True)
def four(entry, quad):
    """The values of four codes."""
    return scaled(quad, bits_f32(entry))


fp8_tile = group_tile(GROUP, 4, see, quad, four, put_scales, divided_quad)
