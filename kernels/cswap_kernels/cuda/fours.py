"""Four words at a time as float32, for the lossy formats: the i-th four begins with word 4 i.

Sixteen bytes of shared memory go at once, and a code of eight bits per word makes a whole u32.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from numba import cuda, float32, float64, int32, uint32, uint64

from cswap_kernels.cuda.floats import MAGNITUDE, half_to_float, narrow_word
from cswap_kernels.cuda.primitives import (
    as_u64,
    bits_f32,
    bits_f64,
    f32_bits,
    f64_bits,
    load16,
    permuting,
    store16,
)
from cswap_kernels.cuda.quads import halves, pair
from cswap_kernels.floats import BFLOAT16

if TYPE_CHECKING:
    from collections.abc import Callable

WHOLE = 0x4B000000
"""Bits of 2**23, to which a byte in the lowest bits adds its own value."""

_first_two, _last_two, _both = permuting(0x0040), permuting(0x4000), permuting(0x7610)
_first_tops, _last_tops = permuting(0x0073), permuting(0x7300)
_byte_0, _byte_1 = permuting(0x7540), permuting(0x7541)
_byte_2, _byte_3 = permuting(0x7542), permuting(0x7543)


@cuda.jit(device=True)
def quad_of(a, b, c, d):
    """The quad of the lowest bytes of four u32."""
    return _both(_first_two(a, b), _last_two(c, d))


@cuda.jit(device=True)
def top_bytes(a, b, c, d):
    """The quad of the highest bytes of four u32."""
    return _both(_first_tops(a, b), _last_tops(c, d))


@cuda.jit(device=True)
def raised(quad):
    """2**23 plus each byte of a quad, as four float32."""
    whole = uint32(WHOLE)
    a, b = bits_f32(_byte_0(quad, whole)), bits_f32(_byte_1(quad, whole))
    return a, b, bits_f32(_byte_2(quad, whole)), bits_f32(_byte_3(quad, whole))


@cuda.jit(device=True)
def scaled(quad, base, scale):
    """``(q - base) * scale``, ``base`` being 2**23 and more, of 2**23 plus each byte of a quad."""
    a, b, c, d = raised(quad)
    a, b = float32(float32(a - base) * scale), float32(float32(b - base) * scale)
    return a, b, float32(float32(c - base) * scale), float32(float32(d - base) * scale)


@cuda.jit(device=True)
def bits_of_four(four):
    """Bits of four float32."""
    return f32_bits(four[0]), f32_bits(four[1]), f32_bits(four[2]), f32_bits(four[3])


@cuda.jit(device=True)
def magnitudes(bits):
    """The bits without signs."""
    mask = uint32(MAGNITUDE)
    a, b = uint32(bits[0] & mask), uint32(bits[1] & mask)
    return a, b, uint32(bits[2] & mask), uint32(bits[3] & mask)


@cuda.jit(device=True)
def largest_of(four):
    """The largest of four u32."""
    a, b = uint32(max(four[0], four[1])), uint32(max(four[2], four[3]))
    return uint32(max(a, b))


@cuda.jit(device=True)
def exponents_of(sizes):
    """The sum (u32) of the biased exponents of four magnitudes."""
    a, b = uint32(sizes[0] >> uint32(23)), uint32(sizes[1] >> uint32(23))
    c, d = uint32(sizes[2] >> uint32(23)), uint32(sizes[3] >> uint32(23))
    return uint32(uint32(a + b) + uint32(c + d))


def four_access(word: int) -> tuple[Callable[..., Any], Callable[..., None]]:
    """(load, store) of four float32 values in words of ``word`` bytes in shared memory.

    load(x, i, kind) -> four float32, kind being IEEE or BFLOAT16; f64 is rounded to nearest even.
    store(x, i, kind, a, b, c, d) is the inverse; see `narrow_word`.
    """
    return {2: _access_2, 4: _access_4, 8: _access_8}[word]()


def _access_4() -> tuple[Callable[..., Any], Callable[..., None]]:
    @cuda.jit(device=True)
    def load(x, i, kind):
        a, b, c, d = load16(x, i)
        return bits_f32(a), bits_f32(b), bits_f32(c), bits_f32(d)

    @cuda.jit(device=True)
    def store(x, i, kind, a, b, c, d):
        store16(x, i, (f32_bits(a), f32_bits(b), f32_bits(c), f32_bits(d)))

    return load, store


def _access_2() -> tuple[Callable[..., Any], Callable[..., None]]:
    @cuda.jit(device=True)
    def two(words, kind):
        if kind == int32(BFLOAT16):
            first = bits_f32(uint32(words << uint32(16)))
            return first, bits_f32(uint32(words & uint32(0xFFFF0000)))
        first = half_to_float(uint32(words & uint32(0xFFFF)))
        return first, half_to_float(uint32(words >> uint32(16)))

    @cuda.jit(device=True)
    def load(x, i, kind):
        low, high = halves(uint64(as_u64(x)[i]))
        a, b = two(low, kind)
        c, d = two(high, kind)
        return a, b, c, d

    @cuda.jit(device=True)
    def store(x, i, kind, a, b, c, d):
        low = uint32(narrow_word(a, kind) | uint32(narrow_word(b, kind) << uint32(16)))
        high = uint32(narrow_word(c, kind) | uint32(narrow_word(d, kind) << uint32(16)))
        as_u64(x)[i] = pair(low, high)

    return load, store


def _access_8() -> tuple[Callable[..., Any], Callable[..., None]]:
    @cuda.jit(device=True)
    def two(x, i):
        a, b, c, d = load16(x, i)
        return float32(bits_f64(pair(a, b))), float32(bits_f64(pair(c, d)))

    @cuda.jit(device=True)
    def load(x, i, kind):
        a, b = two(x, int32(i << int32(1)))
        c, d = two(x, int32(int32(i << int32(1)) + int32(1)))
        return a, b, c, d

    @cuda.jit(device=True)
    def put_two(x, i, a, b):
        low, high = halves(f64_bits(float64(a)))
        other_low, other_high = halves(f64_bits(float64(b)))
        store16(x, i, (low, high, other_low, other_high))

    @cuda.jit(device=True)
    def store(x, i, kind, a, b, c, d):
        put_two(x, int32(i << int32(1)), a, b)
        put_two(x, int32(int32(i << int32(1)) + int32(1)), c, d)

    return load, store
