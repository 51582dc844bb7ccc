"""Shared by the lossy CUDA twins: words to float32 and back; see cswap_kernels/floats.py.

One rounding per operation: the linker is told not to fuse products and sums, see compiler.py.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, int32, uint32, uint64

from cswap_kernels.cuda.primitives import bits_f32, bits_f64, f32_bits, signed, unsigned
from cswap_kernels.cuda.warps import three_of_warps, warp_max, warp_sum
from cswap_kernels.floats import (
    BFLOAT16,
    BFLOAT16_NAN,
    HALF_LEAST,
    HALF_NAN,
    HALF_SHIFT,
    LIMIT,
    OCTAVES,
)

MAGNITUDE = 0x7FFFFFFF
_HALF_MAX = 0x7BFF
_INFINITE = 0x7F800000


@cuda.jit(device=True)
def round_small(u, shift, least):
    """See cswap_kernels/floats.py: bits (u32) of a positive float32 as a smaller float."""
    bias = uint32(least - uint32(1 << 23))
    odd = uint32((u >> shift) & uint32(1))
    half = uint32((uint32(1) << uint32(shift - uint32(1))) - uint32(1))
    if u >= least:
        return uint32(uint32(uint32(u - bias) + uint32(half + odd)) >> shift)
    magic = uint32(least + uint32(shift << uint32(23)))
    return uint32(f32_bits(float32(bits_f32(u) + bits_f32(magic))) - magic)


@cuda.jit(device=True)
def widen_small(code, shift, least):
    """Inverse of `round_small`: the float32 of a code (u32) without sign."""
    moved = uint32(code << shift)
    if moved >= uint32(1 << 23):
        return bits_f32(uint32(moved + uint32(least - uint32(1 << 23))))
    return float32(bits_f32(uint32(moved + least)) - bits_f32(least))


@cuda.jit(device=True)
def half_to_float(w):
    """The float32 of a float16 (u32 of 16 bits); exact."""
    code = uint32(w & uint32(0x7FFF))
    bits = f32_bits(widen_small(code, uint32(HALF_SHIFT), uint32(HALF_LEAST)))
    if code > uint32(_HALF_MAX):
        bits = uint32(bits | uint32(0x7F800000))
    return bits_f32(uint32(bits | uint32(uint32(w & uint32(0x8000)) << uint32(16))))


@cuda.jit(device=True)
def float_to_half(x):
    """The float16 (u32 of 16 bits) nearest to a float32, ties to even; Inf from 65520 on."""
    u = f32_bits(x)
    code = round_small(uint32(u & uint32(MAGNITUDE)), uint32(HALF_SHIFT), uint32(HALF_LEAST))
    if code > uint32(_HALF_MAX + 1):
        code = uint32(_HALF_MAX + 1)
    return uint32(code | uint32((u >> uint32(16)) & uint32(0x8000)))


@cuda.jit(device=True)
def float_to_bfloat16(x):
    """The bfloat16 (u32 of 16 bits) nearest to a float32 that is not NaN, ties to even."""
    u = f32_bits(x)
    odd = uint32((u >> uint32(16)) & uint32(1))
    return uint32(uint32(u + uint32(uint32(0x7FFF) + odd)) >> uint32(16))


@cuda.jit(device=True)
def is_nan(x):
    """Whether a float32 is NaN, by its bits."""
    return uint32(f32_bits(x) & uint32(MAGNITUDE)) > uint32(_INFINITE)


@cuda.jit(device=True)
def ordered(bits):
    """Bits of a float32 (u32) as an i32 of the same order."""
    b = signed(bits)
    return int32(b ^ int32((b >> int32(31)) & int32(MAGNITUDE)))


@cuda.jit(device=True)
def unordered(value):
    """Inverse of `ordered`."""
    return unsigned(int32(value ^ int32((value >> int32(31)) & int32(MAGNITUDE))))


@cuda.jit(device=True)
def narrow_word(value, kind):
    """The word of 2 bytes (u32) nearest to a float32. float16 saturates; NaN is one NaN."""
    if kind == int32(BFLOAT16):
        return uint32(BFLOAT16_NAN) if is_nan(value) else float_to_bfloat16(value)
    half = float_to_half(value)
    if uint32(half & uint32(0x7FFF)) > uint32(_HALF_MAX):
        half = uint32(half - uint32(1))
    return uint32(HALF_NAN) if is_nan(value) else half


@cuda.jit(device=True)
def is_raw(top, exponents, n_nonzero):
    """Whether a tile is stored raw for its values: docs/format/lossy.md, "Tiles stored raw".

    Args: bits of max |x| (i32), sum of biased exponents, non-zeros. More non-zeros do not turn a
    tile that is raw into one that is not.
    """
    distance = int32(int32(int32(top >> int32(23)) * n_nonzero) - exponents)
    return top >= int32(LIMIT) or distance > int32(int32(OCTAVES) * n_nonzero)


@cuda.jit(device=True)
def of_block(top, exponents, n_nonzero, tmp):
    """The arguments of `is_raw` over a block from those of each warp, which are equal in its lanes.

    tmp: see `three_of_warps`. Ends with a syncthreads.
    """
    highest, total, count = three_of_warps(top, exponents, n_nonzero, tmp)
    highest, total, count = warp_max(highest), warp_sum(total), warp_sum(count)
    cuda.syncthreads()
    return highest, total, count


def float_loader(word: int) -> Any:
    """load(x, i, kind) -> float32 of words of ``word`` bytes, kind being IEEE or BFLOAT16.

    f64 is rounded to nearest even.
    """
    if word == 4:

        @cuda.jit(device=True)
        def load(x, i, kind):
            return bits_f32(uint32(x[i]))

    elif word == 8:

        @cuda.jit(device=True)
        def load(x, i, kind):
            return float32(bits_f64(uint64(x[i])))

    else:

        @cuda.jit(device=True)
        def load(x, i, kind):
            if kind == int32(BFLOAT16):
                return bits_f32(uint32(uint32(x[i]) << uint32(16)))
            return half_to_float(uint32(x[i]))

    return load
