"""``fp8`` and ``mxfp8`` on CUDA: the formats of cswap_kernels/{fp8,mxfp8}.py.

measure: the largest magnitude, of ``fp8`` by group, to tmp; then whether the tile stays raw
write: scales, and four codes per thread
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, int32, uint8, uint32, uint64

from cswap_kernels.cuda.fours import (
    bits_of_four,
    exponents_of,
    four_access,
    largest_of,
    magnitudes,
    quad_of,
    raw_test,
    top_bytes,
)
from cswap_kernels.cuda.primitives import (
    FULL,
    advance,
    as_u32,
    as_u64,
    bits_f32,
    f32_bits,
    fused,
    greater,
    lesser,
    signed,
    unsigned,
)
from cswap_kernels.cuda.quads import FLAGS, LOW, ONES, halves, pair
from cswap_kernels.cuda.warps import (
    padded,
    warp_max,
    warp_max_u32,
    zero_bytes,
)
from cswap_kernels.cuda.zvc import zero_rest
from cswap_kernels.floats import E4M3_LEAST, E4M3_SHIFT

if TYPE_CHECKING:
    from cswap_kernels.cuda.container import TileFunctions

LEAST_SCALE = 0x00800000
E_MAX = 8
"""Exponent of E4M3's largest number."""

SCALES = 128
"""Where numbers of the groups begin in tmp, a u64 for each of up to 64; behind `RAW_WORDS`."""

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
def e8m0(c):
    """The float32 of an E8M0 scale (u32 of 8 bits): 2**(c - 127), NaN for 255."""
    bits = uint32(c << uint32(23))
    if c == uint32(0):
        bits = uint32(0x00400000)  # 2**-127 is not a normal number
    if c == uint32(255):
        bits = uint32(0x7FC00000)
    return bits_f32(bits)


@cuda.jit(device=True)
def groups_of(n):
    """Groups of 128 words."""
    return int32((n + int32(127)) >> int32(7))


@cuda.jit(device=True)
def put_scales(tops, n, scales):
    """Write scales, and put (scale, reciprocal) in the place of largest magnitudes.

    Whether one of them is too small for `quotient`. Ends with a syncthreads.
    """
    group, small = int32(cuda.threadIdx.x), int32(0)
    while group < groups_of(n):
        top, _ = halves(uint64(tops[group]))
        bits = f32_bits(float32(bits_f32(top) / float32(448.0)))
        bits = uint32(max(bits, uint32(LEAST_SCALE)))
        scales[group] = bits
        if bits < uint32(SMALL_SCALE):
            small = int32(1)
        tops[group] = pair(bits, f32_bits(float32(float32(1.0) / bits_f32(bits))))
        group = int32(group + int32(cuda.blockDim.x))
    return cuda.syncthreads_or(small)


@cuda.jit(device=True)
def cut(x):
    """A float32 cut to -448 to 448, the range of E4M3."""
    return lesser(greater(x, float32(-448.0)), float32(448.0))


def fp8_tile(word: int, as_words: Any) -> TileFunctions:
    """(measure, write, decode) of ``fp8``, words of ``word`` bytes; contract: container.py."""
    load, store = four_access(word)
    is_raw = raw_test(load)

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        zero_rest(x, n)
        tops, fours = as_u64(advance(tmp, SCALES)), int32(groups_of(n) << int32(5))
        top, exponents, i = uint32(0), uint32(0), int32(cuda.threadIdx.x)
        while i < fours:
            sizes = magnitudes(bits_of_four(load(x, i, int32(a0))))
            exponents = uint32(exponents + exponents_of(sizes))
            largest = warp_max_u32(largest_of(sizes))
            top = uint32(max(top, largest))
            tops[int32(i >> int32(5))] = uint64(largest)  # the same of all lanes
            i = int32(i + int32(cuda.blockDim.x))
        raw = is_raw(x, n, int32(a0), signed(top), signed(exponents), tmp)
        nbytes = int32(padded(int32(groups_of(n) << int32(2))) + n)
        return int32(-1) if raw else nbytes, (int32(0),)

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        tops, end = as_u64(advance(tmp, SCALES)), int32(groups_of(n) << int32(2))
        zero_bytes(dst, end, padded(end))
        small = put_scales(tops, n, as_u32(dst))
        codes, i = as_u32(advance(dst, padded(end))), int32(cuda.threadIdx.x)
        fours = int32(groups_of(n) << int32(5))
        while small and i < fours:
            scale, _ = halves(uint64(tops[int32(i >> int32(5))]))
            scale, four = bits_f32(scale), load(x, i, int32(a0))
            a, b = float32(four[0] / scale), float32(four[1] / scale)
            codes[i] = quad_of_e4m3(a, b, float32(four[2] / scale), float32(four[3] / scale))
            i = int32(i + int32(cuda.blockDim.x))
        while i < fours:
            scale, inverse = halves(uint64(tops[int32(i >> int32(5))]))
            scale, inverse = bits_f32(scale), bits_f32(inverse)
            a, b, c, d = load(x, i, int32(a0))
            a, b = quotient(a, scale, inverse), quotient(b, scale, inverse)
            c, d = quotient(c, scale, inverse), quotient(d, scale, inverse)
            codes[i] = quad_of_e4m3(a, b, c, d)
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
            scale = bits_f32(uint32(scales[int32(i >> int32(5))]))
            a, b, c, d = four_from_e4m3(uint32(codes[i]))
            a, b = float32(a * scale), float32(b * scale)
            store(x, i, int32(a0), a, b, float32(c * scale), float32(d * scale))
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return measure, write, decode


def mxfp8_tile(word: int, as_words: Any) -> TileFunctions:
    """(measure, write, decode) of ``mxfp8``, words of ``word`` bytes; contract: container.py."""
    load, store = four_access(word)
    is_raw = raw_test(load)

    @cuda.jit(device=True)
    def measure(x, n, dst, tmp, a0, a1, a2, a3, first):
        zero_rest(x, n)
        top, exponents, i = uint32(0), uint32(0), int32(cuda.threadIdx.x)
        while int32(i << int32(2)) < n:
            sizes = magnitudes(bits_of_four(load(x, i, int32(a0))))
            exponents = uint32(exponents + exponents_of(sizes))
            top = uint32(max(top, largest_of(sizes)))
            i = int32(i + int32(cuda.blockDim.x))
        raw = is_raw(x, n, int32(a0), warp_max(signed(top)), signed(exponents), tmp)
        nbytes = int32(padded(int32((n + int32(31)) >> int32(5))) + n)
        return int32(-1) if raw else nbytes, (int32(0),)

    @cuda.jit(device=True)
    def largest_of_lanes(value):
        # The largest u32 of the eight lanes that have a group together.
        for k in range(3):
            other = unsigned(int32(cuda.shfl_xor_sync(FULL, signed(value), int32(4 >> k))))
            value = uint32(max(value, other))
        return value

    @cuda.jit(device=True)
    def write(x, n, dst, tmp, state, a0, a1, a2, a3, first):
        end = int32((n + int32(31)) >> int32(5))
        zero_bytes(dst, end, padded(end))
        codes, i = as_u32(advance(dst, padded(end))), int32(cuda.threadIdx.x)
        while i < int32(int32((n + int32(127)) >> int32(7)) << int32(5)):
            a, b, c, d = load(x, i, int32(a0))
            largest = largest_of_lanes(largest_of(magnitudes(bits_of_four((a, b, c, d)))))
            scale = int32(
                max(int32(signed(uint32(largest >> uint32(23))) - int32(E_MAX)), int32(0))
            )
            group = int32(i >> int32(3))
            if int32(i & int32(7)) == int32(0) and group < end:
                dst[group] = uint8(scale)
            inverse = bits_f32(unsigned(int32(int32(int32(254) - scale) << int32(23))))
            a, b = cut(float32(a * inverse)), cut(float32(b * inverse))
            c, d = cut(float32(c * inverse)), cut(float32(d * inverse))
            codes[i] = quad_of_e4m3(a, b, c, d)
            i = int32(i + int32(cuda.blockDim.x))
        if n & int32(127):  # codes were written behind the end
            cuda.syncthreads()

    @cuda.jit(device=True)
    def decode(src, nbytes, x, n, tmp, a0, a1, a2, a3, first):
        start = padded(int32((n + int32(31)) >> int32(5)))
        if nbytes != int32(start + n):
            return int32(-1)
        codes, i = as_u32(advance(src, start)), int32(cuda.threadIdx.x)
        while int32(i << int32(2)) < n:
            scale = e8m0(uint32(src[int32(i >> int32(3))]))
            a, b, c, d = four_from_e4m3(uint32(codes[i]))
            a, b = float32(a * scale), float32(b * scale)
            store(x, i, int32(a0), a, b, float32(c * scale), float32(d * scale))
            i = int32(i + int32(cuda.blockDim.x))
        cuda.syncthreads()
        return int32(0)

    return measure, write, decode
