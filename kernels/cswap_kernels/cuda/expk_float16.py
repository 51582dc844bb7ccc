"""``expk``: words of float16; see expk_layout.py."""

from __future__ import annotations

from typing import Any

from numba import cuda, int32, uint32, uint64

from cswap_kernels.cuda.expk_layout import FIRST, Layout, from_exponents, to_exponents
from cswap_kernels.cuda.primitives import as_u64, load16, permuting, store16
from cswap_kernels.cuda.quads import even_bytes, first_bytes, halves, last_bytes, odd_bytes, pair

FIELD, LOW, SIGN = 0x001F001F, 0x03FF03FF, 0x04000400
"""Of two words: an exponent, the mantissa, and the sign where it is next to that."""


@cuda.jit(device=True)
def exponents(a, b):
    """The quad of four words' exponents."""
    a = uint32(uint32(a >> uint32(10)) & uint32(FIELD))
    b = uint32(uint32(b >> uint32(10)) & uint32(FIELD))
    return even_bytes(a, b)


@cuda.jit(device=True)
def peak(x, i):
    """See expk_layout.py."""
    a, b, c, d = load16(x, i)
    e, f = exponents(a, b), exponents(c, d)
    top = int32(0)
    for k in range(4):
        up = uint32(8 * k)
        top = max(top, int32(uint32(e >> up) & uint32(31)))
        top = max(top, int32(uint32(f >> up) & uint32(31)))
    return int32(top)


@cuda.jit(device=True)
def distances(x, i, high, marks):
    """See expk_layout.py."""
    a, b, c, d = load16(x, i)
    first = from_exponents(exponents(a, b), high, marks)
    return first, from_exponents(exponents(c, d), high, marks)


@cuda.jit(device=True)
def rest_of(w):
    """Signs and mantissas of two words: 11 bits each."""
    return uint32(uint32(w & uint32(LOW)) | uint32(uint32(w >> uint32(5)) & uint32(SIGN)))


@cuda.jit(device=True)
def put_rest(x, i, dst, row):
    """See expk_layout.py."""
    a, b, c, d = load16(x, i)
    a, b, c, d = rest_of(a), rest_of(b), rest_of(c), rest_of(d)
    bytes_ab, bytes_cd = even_bytes(a, b), even_bytes(c, d)
    if int32(i << int32(3)) < row:
        as_u64(dst)[int32(int32(FIRST) + i)] = pair(bytes_ab, bytes_cd)
    return pair(odd_bytes(a, b), odd_bytes(c, d))


def _joining(own_rest: Any, digits: int) -> Any:
    # Of two words, by where bytes of the row and the rest, and of the exponents go.
    own_exponents = permuting(digits)

    @cuda.jit(device=True)
    def two(row, rest, exponents):
        bits = own_rest(row, rest)
        up = uint32(own_exponents(exponents, uint32(0)) & uint32(FIELD))
        moved = uint32(uint32(bits & uint32(SIGN)) << uint32(5))
        return uint32(uint32(uint32(bits & uint32(LOW)) | moved) | uint32(up << uint32(10)))

    return two


first_two, last_two = _joining(first_bytes, 0x4140), _joining(last_bytes, 0x4342)


@cuda.jit(device=True)
def join(src, row, j, codes, rest, high, zero, x, i):
    """See expk_layout.py."""
    low_codes, high_codes = halves(codes)
    e, f = to_exponents(low_codes, high, zero), to_exponents(high_codes, high, zero)
    r, s = halves(uint64(as_u64(src)[int32(int32(FIRST) + j)]))
    v, w = halves(rest)
    a, b = first_two(r, v, e), last_two(r, v, e)
    store16(x, i, (a, b, first_two(s, w, f), last_two(s, w, f)))


FLOAT16 = Layout(5, 10, (peak, distances, put_rest, join))
