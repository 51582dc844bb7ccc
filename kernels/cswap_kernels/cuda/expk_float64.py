"""``expk``: words of float64; see expk_layout.py."""

from __future__ import annotations

from numba import cuda, int32, uint32

from cswap_kernels.cuda.expk_layout import Layout
from cswap_kernels.cuda.primitives import as_u32, load16, permuting, store16
from cswap_kernels.cuda.quads import halves, low_halves, pair, transposed
from cswap_kernels.expk import FAR, HEADER, ZERO

FIELD, LOW, SIGN = 0x7FF, 0x000FFFFF, 0x00100000
"""Of upper halves: an exponent, the mantissa, and the sign where it is next to that."""

lowest_bytes = permuting(0x0040)


@cuda.jit(device=True)
def exponent(upper):
    """The exponent in the upper half of a word."""
    return int32(uint32(upper >> uint32(20)) & uint32(FIELD))


@cuda.jit(device=True)
def peak(x, i):
    """See expk_layout.py."""
    top = int32(0)
    for k in range(4):
        _, a, _, b = load16(x, int32(int32(i << int32(2)) + int32(k)))
        top = int32(max(top, int32(max(exponent(a), exponent(b)))))
    return top


@cuda.jit(device=True)
def distance(upper, high, marks):
    """`distances` of one word, from its upper half."""
    e = exponent(upper)
    below = uint32(min(int32(high - e), int32(FAR)))
    if e == int32(0) and marks != uint32(0):
        below = uint32(ZERO)
    return below


@cuda.jit(device=True)
def four_distances(x, i, high, marks):
    """`distances` of the four words from the i-th two on."""
    _, a, _, b = load16(x, i)
    _, c, _, d = load16(x, int32(i + int32(1)))
    ab = lowest_bytes(distance(a, high, marks), distance(b, high, marks))
    cd = lowest_bytes(distance(c, high, marks), distance(d, high, marks))
    return low_halves(ab, cd)


@cuda.jit(device=True)
def distances(x, i, high, marks):
    """See expk_layout.py."""
    i = int32(i << int32(2))
    first = four_distances(x, i, high, marks)
    return first, four_distances(x, int32(i + int32(2)), high, marks)


@cuda.jit(device=True)
def rest_of(upper):
    """Sign and mantissa in the upper half of a word: 21 bits."""
    moved = uint32(uint32(upper >> uint32(11)) & uint32(SIGN))
    return uint32(uint32(upper & uint32(LOW)) | moved)


@cuda.jit(device=True)
def put_four(x, i, dst, at, step, inside):
    """Write rows of four words, from the i-th two on; the quad of the bits that are left."""
    a, b, c, d = load16(x, i)
    e, f, g, h = load16(x, int32(i + int32(1)))
    a, c, e, g = transposed(a, c, e, g)
    b, d, f, h = transposed(rest_of(b), rest_of(d), rest_of(f), rest_of(h))
    if inside:
        dst[at] = a
        dst[int32(at + step)] = c
        dst[int32(at + int32(step << int32(1)))] = e
        dst[int32(at + int32(step * int32(3)))] = g
        dst[int32(at + int32(step << int32(2)))] = b
        dst[int32(at + int32(step * int32(5)))] = d
    return f


@cuda.jit(device=True)
def put_rest(x, i, dst, row):
    """See expk_layout.py."""
    words, step, inside = as_u32(dst), int32(row >> int32(2)), int32(i << int32(3)) < row
    at, k = int32(int32(HEADER >> 2) + int32(i << int32(1))), int32(i << int32(2))
    first = put_four(x, k, words, at, step, inside)
    k, at = int32(k + int32(2)), int32(at + int32(1))
    return pair(first, put_four(x, k, words, at, step, inside))


@cuda.jit(device=True)
def upper_of(s, code, high, zero):
    """The upper half of a word, from its 21 bits of sign and mantissa and its code."""
    e = int32(0)
    if code != zero:
        e = int32(int32(high - int32(code)) & int32(FIELD))
    moved = uint32(uint32(s & uint32(SIGN)) << uint32(11))
    return uint32(uint32(uint32(s & uint32(LOW)) | moved) | uint32(uint32(e) << uint32(20)))


@cuda.jit(device=True)
def join_four(src, at, step, codes, rest, high, zero, x, i):
    """`join` of the four words from the i-th two on; codes and rest are quads."""
    a, c = uint32(src[at]), uint32(src[int32(at + step)])
    e = uint32(src[int32(at + int32(step << int32(1)))])
    g = uint32(src[int32(at + int32(step * int32(3)))])
    b = uint32(src[int32(at + int32(step << int32(2)))])
    d = uint32(src[int32(at + int32(step * int32(5)))])
    a, c, e, g = transposed(a, c, e, g)
    b, d, f, h = transposed(b, d, rest, uint32(0))
    code = uint32(255)
    b = upper_of(b, uint32(codes & code), high, zero)
    d = upper_of(d, uint32(uint32(codes >> uint32(8)) & code), high, zero)
    f = upper_of(f, uint32(uint32(codes >> uint32(16)) & code), high, zero)
    h = upper_of(h, uint32(codes >> uint32(24)), high, zero)
    store16(x, i, (a, b, c, d))
    store16(x, int32(i + int32(1)), (e, f, g, h))


@cuda.jit(device=True)
def join(src, row, j, codes, rest, high, zero, x, i):
    """See expk_layout.py."""
    words, step = as_u32(src), int32(row >> int32(2))
    at, k = int32(int32(HEADER >> 2) + int32(j << int32(1))), int32(i << int32(2))
    first, second = halves(codes)
    v, w = halves(rest)
    join_four(words, at, step, first, v, high, zero, x, k)
    k, at = int32(k + int32(2)), int32(at + int32(1))
    join_four(words, at, step, second, w, high, zero, x, k)


FLOAT64 = Layout(11, 52, (peak, distances, put_rest, join))
