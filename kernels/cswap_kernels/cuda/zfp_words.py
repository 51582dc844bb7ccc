"""Words of a ``zfp`` block on CUDA: 4 of 32 or 64 bits each, in the registers of one thread.

Device functions come in two kinds, for either width: made here on demand.
"""

from __future__ import annotations

from typing import Any

from numba import cuda, float32, float64, int32, int64, uint32, uint64

from cswap_kernels.cuda.primitives import (
    bits_f32,
    bits_f64,
    f32_bits,
    f64_bits,
    funnel_left32,
    funnel_right32,
)

_EXCHANGES = {
    1: 0x5555555555555555,
    2: 0x3333333333333333,
    4: 0x0F0F0F0F0F0F0F0F,
    8: 0x00FF00FF00FF00FF,
    16: 0x0000FFFF0000FFFF,
    32: 0x00000000FFFFFFFF,
}


@cuda.jit(device=True)
def _left64(low, high, by):
    return uint64(uint64(high << by) | uint64(uint64(low >> uint64(1)) >> uint64(uint64(63) - by)))


@cuda.jit(device=True)
def _right64(low, high, by):
    return uint64(uint64(low >> by) | uint64(uint64(high << uint64(1)) << uint64(uint64(63) - by)))


def word_of(width: int) -> Any:
    """The type of a block's words: unsigned, of as many bits as a value."""
    return uint32 if width == 32 else uint64


def funnels(width: int) -> tuple[Any, Any]:
    """(left, right): high and low word moved by 0 to width - 1 bits; what is then high, or low."""
    return (funnel_left32, funnel_right32) if width == 32 else (_left64, _right64)


def shifts(width: int) -> tuple[Any, Any]:
    """(left, right): 4 words, the lowest first, moved by 0 to 4 * width - 1 bits."""
    u = word_of(width)
    left, right = funnels(width)

    @cuda.jit(device=True)
    def shift_left(a, b, c, d, by):
        if u(by & u(width)) != u(0):
            a, b, c, d = u(0), a, b, c
        if u(by & u(2 * width)) != u(0):
            a, b, c, d = u(0), u(0), a, b
        r = u(by & u(width - 1))
        return left(u(0), a, r), left(a, b, r), left(b, c, r), left(c, d, r)

    @cuda.jit(device=True)
    def shift_right(a, b, c, d, by):
        if u(by & u(width)) != u(0):
            a, b, c, d = b, c, d, u(0)
        if u(by & u(2 * width)) != u(0):
            a, b, c, d = c, d, u(0), u(0)
        r = u(by & u(width - 1))
        return right(a, b, r), right(b, c, r), right(c, d, r), right(d, u(0), r)

    return shift_left, shift_right


def transposes(width: int) -> tuple[Any, Any]:
    """(to planes, from planes): 4 words, and the same bits with a plane per nibble.

    A bit's place has an index of 2 bits for the word and 5 or 6 within it. Values' words and
    planes' words differ by a permutation of these; an exchange swaps one of each kind, and by
    swapping the words, too, turns the order of planes around.
    """
    u = word_of(width)
    ones = (1 << width) - 1

    def pair(by: int) -> tuple[Any, Any]:
        low, high = _EXCHANGES[by] & ones, ~_EXCHANGES[by] & ones

        @cuda.jit(device=True)
        def forth(a, b):
            return (
                u(u(u(a >> u(by)) & u(low)) | u(b & u(high))),
                u(u(a & u(low)) | u(u(b & u(low)) << u(by))),
            )

        @cuda.jit(device=True)
        def back(a, b):
            return (
                u(u(b & u(low)) | u(u(a & u(low)) << u(by))),
                u(u(u(b >> u(by)) & u(low)) | u(a & u(high))),
            )

        return forth, back

    (forth1, back1), (forth2, back2), (forth4, back4) = pair(1), pair(2), pair(4)
    (forth8, back8), (forth16, back16) = pair(8), pair(16)

    if width == 32:

        @cuda.jit(device=True)
        def order(a, b, c, d):
            return a, c, b, d

        reorder = order
    else:
        forth32, back32 = pair(32)

        @cuda.jit(device=True)
        def order(a, b, c, d):
            (a, c), (b, d) = forth32(a, c), forth32(b, d)
            return a, b, c, d

        @cuda.jit(device=True)
        def reorder(a, b, c, d):
            (a, c), (b, d) = back32(a, c), back32(b, d)
            return a, b, c, d

    @cuda.jit(device=True)
    def to_planes(a, b, c, d):
        (a, b), (c, d) = forth1(a, b), forth1(c, d)
        (a, b), (c, d) = forth4(a, b), forth4(c, d)
        (a, b), (c, d) = forth16(a, b), forth16(c, d)
        (a, c), (b, d) = forth2(a, c), forth2(b, d)
        (a, c), (b, d) = forth8(a, c), forth8(b, d)
        return order(a, b, c, d)

    @cuda.jit(device=True)
    def from_planes(a, b, c, d):
        a, b, c, d = reorder(a, b, c, d)
        (a, c), (b, d) = back8(a, c), back8(b, d)
        (a, c), (b, d) = back2(a, c), back2(b, d)
        (a, b), (c, d) = back16(a, b), back16(c, d)
        (a, b), (c, d) = back4(a, b), back4(c, d)
        (a, b), (c, d) = back1(a, b), back1(c, d)
        return a, b, c, d

    return to_planes, from_planes


def lifts(width: int) -> tuple[Any, Any]:
    """(lift, unlift) of 4 integers, wrapping around; see docs/format/zfp.md."""
    i = int32 if width == 32 else int64

    @cuda.jit(device=True)
    def lift(x, y, z, w):
        x = i(i(x + w) >> i(1))
        w = i(w - x)
        z = i(i(z + y) >> i(1))
        y = i(y - z)
        x = i(i(x + z) >> i(1))
        z = i(z - x)
        w = i(i(w + y) >> i(1))
        y = i(y - w)
        w = i(w + i(y >> i(1)))
        y = i(y - i(w >> i(1)))
        return x, y, z, w

    @cuda.jit(device=True)
    def unlift(x, y, z, w):
        y = i(y + i(w >> i(1)))
        w = i(w - i(y >> i(1)))
        y, w = i(y + w), i(w - y)
        z, x = i(z + x), i(x - z)
        y, z = i(y + z), i(z - y)
        w, x = i(w + x), i(x - w)
        return x, y, z, w

    return lift, unlift


def number_functions(width: int) -> tuple[Any, Any]:
    """(quantize, dequantize): bits of a float times a scale (bits, too) to an integer; back."""
    if width == 32:

        @cuda.jit(device=True)
        def quantize(bits, scale):
            return int32(float32(bits_f32(bits) * bits_f32(scale)))

        @cuda.jit(device=True)
        def dequantize(value, scale):
            return f32_bits(float32(float32(value) * bits_f32(scale)))

    else:

        @cuda.jit(device=True)
        def quantize(bits, scale):
            return int64(float64(bits_f64(bits) * bits_f64(scale)))

        @cuda.jit(device=True)
        def dequantize(value, scale):
            return f64_bits(float64(float64(value) * bits_f64(scale)))

    return quantize, dequantize
