"""One block of ``zfp`` on CUDA, in the registers of one thread: four values to its bits and back.

Note [planes as nibbles]
~~~~~~~~~~~~~~~~~~~~~~~~
zfp writes bit plane by bit plane; going through 32 or 64 of them with 4 values each would take
hundreds of instructions. But let ``n`` be the values that are stored verbatim (docs/format/zfp.md):
once n is 3 or 4, what is written of a plane is nothing but its four bits. For n = 3, the bit "has
the last value a 1?" is the last value's. So the four words of coefficients are transposed, plane 0
(the highest) into the lowest nibble, in five or six steps of bit exchanges; all planes from the one
on at which n has reached 3 are in place after one shift of 4 words; the empty planes in front of
them are a shift, too. What remains is a loop over the planes from the first that is not empty to
the one that brings the third value: few, unless the values are smooth. Those are looked up.

The encoder takes these planes from the last to the first, pushing each in front of what there is:
a constant number of funnel shifts, no position to keep, and bits beyond the budget fall off at the
end.

Note [exact products]
~~~~~~~~~~~~~~~~~~~~~
Values are scaled by powers of two: exact, or too small to matter. Contraction to fused multiply-add
could change nothing, and there is nothing to contract with.
"""

from __future__ import annotations

import math
from typing import Any, Final

from numba import cuda, int32, uint32

from cswap_kernels.cuda.primitives import signed, signed64, unsigned, unsigned64
from cswap_kernels.cuda.zfp_words import (
    funnels,
    lifts,
    number_functions,
    shifts,
    transposes,
    word_of,
)
from cswap_kernels.zfp import EXPONENT_BITS, SMALLEST

ENCODE_TABLE: Final = 3 * 16
DECODE_TABLE: Final = 3 * 128
"""Entries, u32."""

_FLOAT = {32: (23, 127), 64: (52, 1023)}
"""Mantissa bits and bias by bits of a value."""

_NEGABINARY = 0xAAAAAAAAAAAAAAAA


@cuda.jit(device=True)
def write_plane(plane, n):
    """Bits of a plane (4 bits) of which n values are verbatim, then in bits 8 on their number."""
    code, at = uint32(plane & uint32((uint32(1) << n) - uint32(1))), uint32(n)
    while n < uint32(4):
        if uint32(plane >> n) == uint32(0):
            at = uint32(at + uint32(1))  # 0: no more
            break
        code = uint32(code | uint32(uint32(1) << at))
        at = uint32(at + uint32(1))
        while n < uint32(3) and uint32(uint32(plane >> n) & uint32(1)) == uint32(0):
            at, n = uint32(at + uint32(1)), uint32(n + uint32(1))
        if n < uint32(3):  # that the last value has it goes without saying
            code = uint32(code | uint32(uint32(1) << at))
            at = uint32(at + uint32(1))
        n = uint32(n + uint32(1))
    return uint32(code | uint32(at << uint32(8)))


@cuda.jit(device=True)
def read_plane(code, left, n):
    """Inverse, of a stream of which ``left`` bits are left and then zeros.

    Returns the plane, in bits 4 on the new n, and in bits 8 on the bits read.
    """
    plane, at = uint32(code & uint32((uint32(1) << n) - uint32(1))), uint32(n)
    while n < uint32(4) and at < left and uint32(uint32(code >> at) & uint32(1)) != uint32(0):
        at = uint32(at + uint32(1))
        while n < uint32(3) and at < left and uint32(uint32(code >> at) & uint32(1)) == uint32(0):
            at, n = uint32(at + uint32(1)), uint32(n + uint32(1))
        if n < uint32(3):
            at = uint32(at + uint32(1))
        plane = uint32(plane | uint32(uint32(1) << n))
        n = uint32(n + uint32(1))
    if n < uint32(4):
        at = uint32(at + uint32(1))
    return uint32(uint32(plane | uint32(n << uint32(4))) | uint32(at << uint32(8)))


@cuda.jit(device=True)
def fill_encode_table(table):
    """`write_plane` for n = 0, 1, 2, at 16 n + plane. No syncthreads."""
    i = int32(cuda.threadIdx.x)
    while i < int32(ENCODE_TABLE):
        table[i] = write_plane(uint32(i & int32(15)), uint32(i >> int32(4)))
        i = int32(i + int32(cuda.blockDim.x))


@cuda.jit(device=True)
def fill_decode_table(table):
    """`read_plane` for n = 0, 1, 2, at 128 n + the next 7 bits. No syncthreads."""
    i = int32(cuda.threadIdx.x)
    while i < int32(DECODE_TABLE):
        table[i] = read_plane(uint32(i & int32(127)), uint32(8), uint32(i >> int32(7)))
        i = int32(i + int32(cuda.blockDim.x))


def block_encoder(width: int) -> Any:
    """The device function (bits of 4 values, of the largest magnitude, table) -> 4 words of code.

    The largest is below LARGEST. What is beyond the budget is not cut off; words lowest first.
    """
    u, mask = word_of(width), _NEGABINARY & ((1 << width) - 1)
    to_bits = unsigned if width == 32 else unsigned64
    mantissa, bias = _FLOAT[width]
    head, least = 1 + EXPONENT_BITS[width // 8], magnitude_bits(SMALLEST, width)
    magnitude = (1 << (width - 1)) - 1
    left, right = funnels(width)
    _, shift_right = shifts(width)
    to_planes, _ = transposes(width)
    lift, _ = lifts(width)
    quantize, _ = number_functions(width)

    @cuda.jit(device=True)
    def integer(bits, scale):
        if u(bits & u(magnitude)) < u(least):
            bits = u(0)
        return quantize(bits, scale)

    @cuda.jit(device=True)
    def negabinary(value):
        return u(u(to_bits(value) + u(mask)) ^ u(mask))

    @cuda.jit(device=True)
    def push(a, b, c, d, entry):
        # In front of the planes that are there already.
        by = u(entry >> uint32(8))
        code = u(entry & uint32(255))
        return u(left(u(0), a, by) | code), left(a, b, by), left(b, c, by), left(c, d, by)

    @cuda.jit(device=True)
    def encode(v0, v1, v2, v3, top, table):
        if top < u(least):
            return u(0), u(0), u(0), u(0)
        exponent = u(top >> u(mantissa))
        scale = u(u(u(width - 3 + 2 * bias) - exponent) << u(mantissa))
        x, y, z, w = lift(
            integer(v0, scale), integer(v1, scale), integer(v2, scale), integer(v3, scale)
        )
        v0, v1, v2, v3 = negabinary(x), negabinary(y), negabinary(z), negabinary(w)
        third = int32(min(int32(cuda.clz(u(v2 | v3))), int32(width - 1)))
        from_second = u(u(v2 | v3) | v1)
        from_first = u(from_second | v0)
        a, b, c, d = to_planes(v0, v1, v2, v3)
        a, b, c, d = shift_right(a, b, c, d, u(third << int32(2)))
        plane = uint32(a & u(15))
        a, b, c, d = right(a, b, u(4)), right(b, c, u(4)), right(c, d, u(4)), u(d >> u(4))
        # A bit that moves, not an index: compilers would unroll a loop that they can count, and
        # threads of a warp, which loop differently often, would wait for each other twice.
        bit = right(u(1 << (width - 1)), u(0), u(third))
        while True:
            if bit <= u(from_first >> u(1)):  # a higher plane has the first value
                plane = uint32(plane + uint32(16))
            if bit <= u(from_second >> u(1)):
                plane = uint32(plane + uint32(16))
            a, b, c, d = push(a, b, c, d, uint32(table[int32(plane)]))
            if bit > u(from_first >> u(1)):
                break
            bit = u(bit << u(1))
            plane = uint32(0)
            if u(v0 & bit) != u(0):
                plane = uint32(1)
            if u(v1 & bit) != u(0):
                plane = uint32(plane | uint32(2))
        empty = u(min(int32(cuda.clz(from_first)), int32(width - 1)))
        d, c, b, a = left(c, d, empty), left(b, c, empty), left(a, b, empty), left(u(0), a, empty)
        d, c, b, a = (
            left(c, d, u(head)),
            left(b, c, u(head)),
            left(a, b, u(head)),
            u(a << u(head)),
        )
        return u(a | u(u(u(exponent + u(1)) << u(1)) | u(1))), b, c, d

    return encode


def block_decoder(width: int) -> Any:
    """The device function (4 words of code, its bits, table) -> bits of 4 values.

    The code is 0 from its bits on.
    """
    u, mask = word_of(width), _NEGABINARY & ((1 << width) - 1)
    to_integer = signed if width == 32 else signed64
    mantissa, _ = _FLOAT[width]
    exponent_bits = EXPONENT_BITS[width // 8]
    head = 1 + exponent_bits
    _, right = funnels(width)
    shift_left, _ = shifts(width)
    _, from_planes = transposes(width)
    _, unlift = lifts(width)
    _, dequantize = number_functions(width)

    @cuda.jit(device=True)
    def integer(negabinary):
        return to_integer(u(u(negabinary ^ u(mask)) - u(mask)))

    @cuda.jit(device=True)
    def drop(a, b, c, d, by):
        return right(a, b, by), right(b, c, by), right(c, d, by), right(d, u(0), by)

    @cuda.jit(device=True)
    def scale_of(field):
        # 2**(e - (width - 2)): denormal, in the end 0, for what no encoder writes.
        if field > u(width - 2):
            return u(u(field - u(width - 2)) << u(mantissa))
        return u(u(1 << (mantissa - 1)) >> u(u(width - 2) - field))

    @cuda.jit(device=True)
    def decode(a, b, c, d, bits, table):
        if u(a & u(1)) == u(0):
            return u(0), u(0), u(0), u(0)
        scale = scale_of(u(u(a >> u(1)) & u((1 << exponent_bits) - 1)))
        a, b, c, d = drop(a, b, c, d, u(head))
        # Empty planes first: as many as zeros, or all.
        k = int32(cuda.popc(u(u(~a) & u(a - u(1)))))
        left = int32(int32(bits - int32(head)) - k)
        if k >= int32(width) or left <= int32(0):
            return u(0), u(0), u(0), u(0)
        a, b, c, d = drop(a, b, c, d, u(k))
        v0, v1, v2, v3, n = u(0), u(0), u(0), u(0), uint32(0)
        bit = right(u(1 << (width - 1)), u(0), u(k))
        while n < uint32(3) and k < int32(width) and left > int32(0):
            code = uint32(a & u(127))
            entry = uint32(table[int32(uint32(n << uint32(7)) | code)])
            if int32(entry >> uint32(8)) > left:  # the bits end within this plane
                entry = read_plane(code, uint32(left), n)
            if uint32(entry & uint32(1)) != uint32(0):
                v0 = u(v0 | bit)
            if uint32(entry & uint32(2)) != uint32(0):
                v1 = u(v1 | bit)
            if uint32(entry & uint32(4)) != uint32(0):
                v2 = u(v2 | bit)
            if uint32(entry & uint32(8)) != uint32(0):
                v3 = u(v3 | bit)
            bit = u(bit >> u(1))
            n = uint32(uint32(entry >> uint32(4)) & uint32(7))
            a, b, c, d = drop(a, b, c, d, u(entry >> uint32(8)))
            left = int32(left - int32(entry >> uint32(8)))
            k = int32(k + int32(1))
        if k < int32(width) and left > int32(0):
            a, b, c, d = shift_left(a, b, c, d, u(k << int32(2)))
            a, b, c, d = from_planes(a, b, c, d)
            v0, v1, v2, v3 = u(v0 | a), u(v1 | b), u(v2 | c), u(v3 | d)
        x, y, z, w = unlift(integer(v0), integer(v1), integer(v2), integer(v3))
        return (
            dequantize(x, scale),
            dequantize(y, scale),
            dequantize(z, scale),
            dequantize(w, scale),
        )

    return decode


def magnitude_bits(limits: dict[int, float], width: int) -> int:
    """Bits of a power of two among `cswap_kernels.zfp`'s limits, as a float."""
    mantissa, bias = _FLOAT[width]
    return (math.frexp(limits[width // 8])[1] - 1 + bias) << mantissa
