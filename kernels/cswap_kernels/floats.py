"""Shared by the lossy formats: words to float32 and back, roundings, and the test for raw tiles.

All lossy formats compute in IEEE float32 with one rounding per operation. A compiler may contract
two operations only if the first is exact. So CPU and GPU write the same bytes, with or without
fused multiply-add. See docs/format/lossy.md.

Loops run over unsigned indices, because Numba then generates no code for negative indices, and LLVM
vectorises the loops.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Final

import numpy as np
from numba import types
from numba.extending import intrinsic

from cswap_kernels.jit import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray

PIECE: Final = 2048
"""Number of words that are widened or narrowed at once: a multiple of every group, small enough for
the caches. With a whole tile at once, 16-bit words from memory took twice as long."""

IEEE: Final = 0
"""args[0]: words are IEEE floats of their size."""

BFLOAT16: Final = 1
"""args[0]: words of two bytes are bfloat16."""

LIMIT: Final = 0x7E800000
"""Bits of 2**126. A tile with a magnitude from here on (or Inf, NaN) is stored raw: below, the
range of a group cannot overflow, nor a decoded value."""

OCTAVES: Final = 12
"""A tile whose largest magnitude is more octaves above its mean exponent is stored raw."""

HALF_SHIFT, HALF_LEAST = 13, 113 << 23
"""float16 has 13 mantissa bits less than float32, and 2**-14 is its smallest normal number."""

E4M3_SHIFT, E4M3_LEAST = 20, 121 << 23
"""E4M3 has 20 mantissa bits less than float32, and 2**-6 is its smallest normal number."""

HALF_NAN, BFLOAT16_NAN = 0x7E00, 0x7FC0
"""The NaN that 16-bit words get if a decoder computes NaN from a damaged payload."""

_HALF_MAX = 0x7BFF
_INFINITE = 0x7F800000
_M = np.int32(0x7FFFFFFF)


def _bitcast(source: Any, target: Any) -> Any:
    def typed(_context: Any, _x: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.bitcast(args[0], context.get_value_type(target))

        return target(source), generate

    return intrinsic(typed)


bits_of = _bitcast(types.float32, types.uint32)
float_of = _bitcast(types.uint32, types.float32)
bits_of_double = _bitcast(types.float64, types.uint64)
double_of = _bitcast(types.uint64, types.float64)


def _rounding(name: str) -> Any:
    def typed(_context: Any, _x: Any) -> Any:
        def generate(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            kinds = [context.get_value_type(types.float32)]
            return builder.call(builder.module.declare_intrinsic(name, kinds), args)

        return types.float32(types.float32), generate

    return intrinsic(typed)


rint = _rounding("llvm.rint")  # to nearest, ties to even
floor = _rounding("llvm.floor")


@njit(nogil=True, cache=True)
def round_small(magnitude, shift, least):
    """Bits of a positive float32 (u32), rounded to nearest even, as a float of fewer bits.

    shift and least as in HALF_*, E4M3_*. Overflow runs on into the codes above the largest.
    """
    u = np.uint32(magnitude)
    bias = np.uint32(least - (1 << 23))
    odd = np.uint32((u >> np.uint32(shift)) & np.uint32(1))
    half = np.uint32((1 << (shift - 1)) - 1)
    normal = np.uint32(np.uint32(u - bias + half + odd) >> np.uint32(shift))
    # The last bit of 2**k is the smallest denormal. So adding 2**k rounds x to a multiple of it.
    magic = np.uint32(least + (shift << 23))
    denormal = np.uint32(bits_of(float_of(u) + float_of(magic)) - magic)
    return normal if u >= np.uint32(least) else denormal


@njit(nogil=True, cache=True)
def widen_small(code, shift, least):
    """Inverse of `round_small`, code (u32) without sign: the float32 of the same value."""
    c = np.uint32(code)
    moved = np.uint32(c << np.uint32(shift))
    normal = float_of(np.uint32(moved + np.uint32(least - (1 << 23))))
    denormal = float_of(np.uint32(moved + np.uint32(least))) - float_of(np.uint32(least))
    return normal if moved >= np.uint32(1 << 23) else denormal


@njit(nogil=True, cache=True)
def half_to_float(word):
    """The float32 of a float16 (u16); exact."""
    w = np.uint32(word)
    code = np.uint32(w & np.uint32(0x7FFF))
    bits = bits_of(widen_small(code, HALF_SHIFT, HALF_LEAST))
    bits |= np.uint32(0x7F800000) if code > np.uint32(_HALF_MAX) else np.uint32(0)
    return float_of(np.uint32(bits | np.uint32((w & np.uint32(0x8000)) << np.uint32(16))))


@njit(nogil=True, cache=True)
def float_to_half(x):
    """The float16 (u16) nearest to a float32, ties to even; Inf from 65520 on, and for NaN."""
    u = bits_of(x)
    code = round_small(np.uint32(u & np.uint32(_M)), HALF_SHIFT, HALF_LEAST)
    code = min(np.uint32(code), np.uint32(_HALF_MAX + 1))
    return np.uint16(code | np.uint32((u >> np.uint32(16)) & np.uint32(0x8000)))


@njit(nogil=True, cache=True)
def float_to_bfloat16(x):
    """The bfloat16 (u16) nearest to a float32, ties to even; for NaN any NaN or infinity."""
    u = bits_of(x)
    odd = np.uint32((u >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(u + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@njit(nogil=True, cache=True)
def is_nan(x):
    """Whether a float32 is NaN, by its bits."""
    return np.uint32(bits_of(x) & np.uint32(_M)) > np.uint32(_INFINITE)


@njit(nogil=True, cache=True)
def floats_of(words):
    """f32 memory for widened pieces: space for one piece; for u32, a view of all words."""
    if words.itemsize == 4:
        return words.view(np.float32)
    return np.empty(min(words.size, PIECE), np.float32)


@njit(nogil=True, cache=True)
def widen_piece(words, first, n, kind, x):
    """x[:n] = words[first : first + n] u16|u64; f64 is rounded to nearest even. Nothing for u32."""
    if words.itemsize == 8:
        for i in range(np.uint64(n)):
            x[i] = np.float32(double_of(np.uint64(words[np.uint64(first) + i])))
    elif words.itemsize == 2 and kind == BFLOAT16:
        for i in range(np.uint64(n)):
            x[i] = float_of(np.uint32(np.uint32(words[np.uint64(first) + i]) << np.uint32(16)))
    elif words.itemsize == 2:
        for i in range(np.uint64(n)):
            x[i] = half_to_float(np.uint16(words[np.uint64(first) + i]))


@njit(nogil=True, cache=True)
def narrow_piece(x, words, first, n, kind):
    """Inverse of `widen_piece`; rounds to nearest even. NaN becomes one NaN in words of 2 bytes.

    float16 saturates at its largest number: the middle of a step may exceed the largest encoded
    value.
    """
    if words.itemsize == 8:
        for i in range(np.uint64(n)):
            words[np.uint64(first) + i] = bits_of_double(np.float64(x[i]))
    elif words.itemsize == 2 and kind == BFLOAT16:
        for i in range(np.uint64(n)):
            bfloat = float_to_bfloat16(x[i])
            words[np.uint64(first) + i] = np.uint16(BFLOAT16_NAN) if is_nan(x[i]) else bfloat
    elif words.itemsize == 2:
        for i in range(np.uint64(n)):
            half = float_to_half(x[i])
            half -= np.uint16((half & np.uint16(0x7FFF)) > np.uint16(_HALF_MAX))
            words[np.uint64(first) + i] = np.uint16(HALF_NAN) if is_nan(x[i]) else half


@njit(nogil=True, cache=True)
def widen(words, kind):
    """[n] f32 of words [n] u16|u32|u64; a view of u32."""
    x = words.view(np.float32) if words.itemsize == 4 else np.empty(words.size, np.float32)
    widen_piece(words, 0, words.size, kind, x)
    return x


@njit(nogil=True, cache=True)
def narrow(x, words, kind):
    """Inverse of `widen`, for u16 and u64."""
    narrow_piece(x, words, 0, words.size, kind)


@njit(nogil=True, cache=True)
def ordered(bits):
    """Bits of a float32 (u32) as an int32 of the same order; its own inverse but for the type."""
    b = np.int32(bits)
    return np.int32(b ^ np.int32((b >> np.int32(31)) & _M))


# References: the same in numpy, slow and obvious.


def widen_reference(words: NDArray[Any], kind: int) -> NDArray[np.float32]:
    """Words [n] u16|u32|u64 as [n] f32."""
    if words.itemsize == 2 and kind == BFLOAT16:
        return (words.astype(np.uint32) << 16).view(np.float32)
    with np.errstate(over="ignore", under="ignore"):
        return words.view(f"f{words.itemsize}").astype(np.float32)


def narrow_reference(x: NDArray[np.float32], dtype: Any, kind: int) -> NDArray[Any]:
    """X [n] f32 as words of ``dtype`` (u2, u4, u8)."""
    size = np.dtype(dtype).itemsize
    if size == 2 and kind == BFLOAT16:
        bits = x.view(np.uint32)
        rounded = (bits + 0x7FFF + (bits >> 16 & 1)) >> 16
        return np.where(np.isnan(x), BFLOAT16_NAN, rounded).astype(np.uint16)
    if size == 2:
        x = np.clip(x, np.float32(-65504), np.float32(65504))
        return np.where(np.isnan(x), HALF_NAN, x.astype("f2").view(np.uint16)).astype(dtype)
    return x.astype(f"f{size}").view(dtype)


def is_raw_reference(x: NDArray[np.float32]) -> bool:
    """Whether a tile x [n] f32 is stored raw for its values."""
    magnitudes = x.view(np.uint32) & 0x7FFFFFFF
    exponents = magnitudes[magnitudes > 0].astype(np.int64) >> 23
    if magnitudes.size and magnitudes.max() >= LIMIT:
        return True
    return (
        exponents.size > 0 and int((exponents.max() - exponents).sum()) > OCTAVES * exponents.size
    )


def pad_reference(data: bytes) -> bytes:
    """Data filled with zeros to a multiple of 16 bytes."""
    return data + bytes(-len(data) % 16)
