"""``expk``: words of bfloat16; see expk_layout.py."""

from __future__ import annotations

from typing import Any

from numba import cuda, int32, uint32, uint64

from cswap_kernels.cuda.expk_layout import FIRST, Layout, from_exponents, larger, to_exponents
from cswap_kernels.cuda.primitives import as_u64, load16, permuting, store16
from cswap_kernels.cuda.quads import even_bytes, halves, odd_bytes, pair

LOW, SIGN = 0x007F007F, 0x00800080
"""Of two words: bits of the mantissa, and where the byte of sign and mantissa has the sign."""


@cuda.jit(device=True)
def peak(x, i):
    """See expk_layout.py."""
    # Signs are shifted out. Bits below an exponent do not change which one is the largest.
    a, b, c, d = load16(x, i)
    p, q = uint32(a << uint32(1)), uint32(b << uint32(1))
    r, s = uint32(c << uint32(1)), uint32(d << uint32(1))
    upper = larger(larger(p, q), larger(r, s))
    p, q = uint32(a << uint32(17)), uint32(b << uint32(17))
    r, s = uint32(c << uint32(17)), uint32(d << uint32(17))
    return int32(larger(upper, larger(larger(p, q), larger(r, s))) >> uint32(24))


@cuda.jit(device=True)
def exponents(a, b):
    """The quad of four words' exponents."""
    return odd_bytes(uint32(a << uint32(1)), uint32(b << uint32(1)))


@cuda.jit(device=True)
def distances(x, i, high, marks):
    """See expk_layout.py."""
    a, b, c, d = load16(x, i)
    first = from_exponents(exponents(a, b), high, marks)
    return first, from_exponents(exponents(c, d), high, marks)


@cuda.jit(device=True)
def rest_of(a, b):
    """The quad of four words' signs and mantissas."""
    a = uint32(uint32(a & uint32(LOW)) | uint32(uint32(a >> uint32(8)) & uint32(SIGN)))
    b = uint32(uint32(b & uint32(LOW)) | uint32(uint32(b >> uint32(8)) & uint32(SIGN)))
    return even_bytes(a, b)


@cuda.jit(device=True)
def put_rest(x, i, dst, row):
    """See expk_layout.py."""
    a, b, c, d = load16(x, i)
    if int32(i << int32(3)) < row:
        as_u64(dst)[int32(int32(FIRST) + i)] = pair(rest_of(a, b), rest_of(c, d))
    return uint64(0)


def _joining(rest_digits: int, digits: int) -> Any:
    # Of two words, by where bytes of the rest and of the exponents go.
    own_rest, own_exponents = permuting(rest_digits), permuting(digits)

    @cuda.jit(device=True)
    def two(rest, exponents):
        bits = uint32(own_rest(rest, rest) & uint32(0x807F807F))
        return uint32(bits | uint32(own_exponents(exponents, uint32(0)) << uint32(7)))

    return two


first_two, last_two = _joining(0x1100, 0x4140), _joining(0x3322, 0x4342)


@cuda.jit(device=True)
def join(src, row, j, codes, rest, high, zero, x, i):
    """See expk_layout.py."""
    low_codes, high_codes = halves(codes)
    e, f = to_exponents(low_codes, high, zero), to_exponents(high_codes, high, zero)
    r, s = halves(uint64(as_u64(src)[int32(int32(FIRST) + j)]))
    store16(x, i, (first_two(r, e), last_two(r, e), first_two(s, f), last_two(s, f)))


BFLOAT16 = Layout(8, 7, (peak, distances, put_rest, join))
