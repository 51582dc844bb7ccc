"""``expk``: words of float32; see expk_layout.py."""

from __future__ import annotations

from numba import cuda, int32, uint32, uint64

from cswap_kernels.cuda.expk_layout import FIRST, Layout, from_exponents, larger, to_exponents
from cswap_kernels.cuda.primitives import as_u64, load16, permuting, store16
from cswap_kernels.cuda.quads import halves, low_halves, pair, transposed

FIELD, LOW, SIGN = 0x7F800000, 0x007FFFFF, 0x00800000
"""Exponent and mantissa, and the sign where it is next to the mantissa."""

top_bytes = permuting(0x0073)


@cuda.jit(device=True)
def four_peak(x, i):
    """The field with the largest exponent of the i-th four words."""
    a, b, c, d = load16(x, i)
    a, b = uint32(a & uint32(FIELD)), uint32(b & uint32(FIELD))
    return larger(larger(a, b), larger(uint32(c & uint32(FIELD)), uint32(d & uint32(FIELD))))


@cuda.jit(device=True)
def peak(x, i):
    """See expk_layout.py."""
    i = int32(i << int32(1))
    return int32(larger(four_peak(x, i), four_peak(x, int32(i + int32(1)))) >> uint32(23))


@cuda.jit(device=True)
def exponents(x, i):
    """The quad of the i-th four words' exponents."""
    a, b, c, d = load16(x, i)
    ab = top_bytes(uint32(a << uint32(1)), uint32(b << uint32(1)))
    cd = top_bytes(uint32(c << uint32(1)), uint32(d << uint32(1)))
    return low_halves(ab, cd)


@cuda.jit(device=True)
def distances(x, i, high, marks):
    """See expk_layout.py."""
    i = int32(i << int32(1))
    first = from_exponents(exponents(x, i), high, marks)
    return first, from_exponents(exponents(x, int32(i + int32(1))), high, marks)


@cuda.jit(device=True)
def rest_of(w):
    """Sign and mantissa: 24 bits."""
    return uint32(uint32(w & uint32(LOW)) | uint32(uint32(w >> uint32(8)) & uint32(SIGN)))


@cuda.jit(device=True)
def put_rest(x, i, dst, row):
    """See expk_layout.py."""
    a, b, c, d = load16(x, int32(i << int32(1)))
    e, f, g, h = load16(x, int32(int32(i << int32(1)) + int32(1)))
    a, b, c, _ = transposed(rest_of(a), rest_of(b), rest_of(c), rest_of(d))
    e, f, g, _ = transposed(rest_of(e), rest_of(f), rest_of(g), rest_of(h))
    if int32(i << int32(3)) < row:
        rows, step = as_u64(dst), int32(row >> int32(3))
        at = int32(int32(FIRST) + i)
        rows[at] = pair(a, e)
        rows[int32(at + step)] = pair(b, f)
        rows[int32(at + int32(step << int32(1)))] = pair(c, g)
    return uint64(0)


@cuda.jit(device=True)
def word_of(w):
    """The word of an exponent, in the upper byte of w, and the sign and mantissa below."""
    upper = uint32(uint32(w >> uint32(1)) & uint32(FIELD))
    return uint32(
        uint32(upper | uint32(w & uint32(LOW))) | uint32(uint32(w & uint32(SIGN)) << uint32(8))
    )


@cuda.jit(device=True)
def join(src, row, j, codes, rest, high, zero, x, i):
    """See expk_layout.py."""
    low_codes, high_codes = halves(codes)
    e, f = to_exponents(low_codes, high, zero), to_exponents(high_codes, high, zero)
    rows, step, at = as_u64(src), int32(row >> int32(3)), int32(int32(FIRST) + j)
    a, r = halves(uint64(rows[at]))
    b, s = halves(uint64(rows[int32(at + step)]))
    c, t = halves(uint64(rows[int32(at + int32(step << int32(1)))]))
    a, b, c, e = transposed(a, b, c, e)
    r, s, t, f = transposed(r, s, t, f)
    i = int32(i << int32(1))
    store16(x, i, (word_of(a), word_of(b), word_of(c), word_of(e)))
    store16(x, int32(i + int32(1)), (word_of(r), word_of(s), word_of(t), word_of(f)))


FLOAT32 = Layout(8, 23, (peak, distances, put_rest, join))
