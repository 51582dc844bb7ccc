"""Words as ``bitpack`` takes them apart and joins them, eight at a time.

Row k of a tile has byte k of every word's distance from the smallest one. For each word size there
are device functions, p being (u64 pointer, index of the i-th eight bytes of row 0, step from row to
row, number of rows, whether rows have so many bytes):

    words(x, i) -> eight integers
        The i-th eight words of x.
    put(x, i, low, p) -> u64
        Write the rows of their distances from low (u64). The bytes of the row behind the last one.
    join(x, i, low, p, rest)
        Write the i-th eight words of x from their rows and from the row behind the last one.
"""

from __future__ import annotations

from typing import Any, Final

from numba import cuda, int32, uint32, uint64

from cswap_kernels.cuda.primitives import as_u64, load16, store16
from cswap_kernels.cuda.quads import (
    even_bytes,
    first_bytes,
    halves,
    last_bytes,
    odd_bytes,
    pair,
    transposed,
)

TOPS = {1: 0x80808080, 2: 0x80008000}
ONCE = {1: 0x01010101, 2: 0x00010001}


@cuda.jit(device=True)
def put_row(p, k, row):
    """Write row k if it is one of the rows; it if it is the next one, else 0."""
    eights, at, step, rows, inside = p
    if inside and rows > int32(k):
        eights[int32(at + int32(step * int32(k)))] = row
    return row if rows == int32(k) else uint64(0)


@cuda.jit(device=True)
def get_row(p, k, rest):
    """Row k, ``rest`` if the rows end before it, or 0 from there on."""
    eights, at, step, rows, _ = p
    if rows > int32(k):
        return uint64(eights[int32(at + int32(step * int32(k)))])
    return rest if rows == int32(k) else uint64(0)


@cuda.jit(device=True)
def minus(a, b, tops):
    """Differences of the parts of two u32, modulo their size; ``tops`` has each part's top bit."""
    difference = uint32(uint32(a | tops) - uint32(b & uint32(~tops)))
    return uint32(difference ^ uint32(uint32(a ^ uint32(~b)) & tops))


@cuda.jit(device=True)
def plus(a, b, tops):
    """Sums of the parts of two u32; see `minus`."""
    total = uint32(uint32(a & uint32(~tops)) + uint32(b & uint32(~tops)))
    return uint32(total ^ uint32(uint32(a ^ b) & tops))


@cuda.jit(device=True)
def four_longs(x, i):
    """Four u64 of x, from the i-th pair of them on."""
    a, b, c, d = load16(x, i)
    e, f, g, h = load16(x, int32(i + int32(1)))
    return (pair(a, b), pair(c, d), pair(e, f), pair(g, h))


def _bytes() -> tuple[Any, Any, Any]:
    tops, once = TOPS[1], ONCE[1]

    @cuda.jit(device=True)
    def four(quad):
        a, b = uint32(quad & uint32(255)), uint32(uint32(quad >> uint32(8)) & uint32(255))
        c, d = uint32(uint32(quad >> uint32(16)) & uint32(255)), uint32(quad >> uint32(24))
        return a, b, c, d

    @cuda.jit(device=True)
    def words(x, i):
        low, high = halves(uint64(as_u64(x)[i]))
        return four(low) + four(high)

    @cuda.jit(device=True)
    def put(x, i, low, p):
        a, b = halves(uint64(as_u64(x)[i]))
        base, mask = uint32(uint32(low) * uint32(once)), uint32(tops)
        return put_row(p, 0, pair(minus(a, base, mask), minus(b, base, mask)))

    @cuda.jit(device=True)
    def join(x, i, low, p, rest):
        a, b = halves(get_row(p, 0, rest))
        base, mask = uint32(uint32(low) * uint32(once)), uint32(tops)
        as_u64(x)[i] = pair(plus(a, base, mask), plus(b, base, mask))

    return words, put, join


def _halves() -> tuple[Any, Any, Any]:
    tops, once = TOPS[2], ONCE[2]

    @cuda.jit(device=True)
    def two(both):
        return uint32(both & uint32(0xFFFF)), uint32(both >> uint32(16))

    @cuda.jit(device=True)
    def words(x, i):
        a, b, c, d = load16(x, i)
        return two(a) + two(b) + two(c) + two(d)

    @cuda.jit(device=True)
    def put(x, i, low, p):
        base, mask = uint32(uint32(low) * uint32(once)), uint32(tops)
        a, b, c, d = load16(x, i)
        a, b = minus(a, base, mask), minus(b, base, mask)
        c, d = minus(c, base, mask), minus(d, base, mask)
        rest = put_row(p, 0, pair(even_bytes(a, b), even_bytes(c, d)))
        return uint64(rest | put_row(p, 1, pair(odd_bytes(a, b), odd_bytes(c, d))))

    @cuda.jit(device=True)
    def join(x, i, low, p, rest):
        base, mask = uint32(uint32(low) * uint32(once)), uint32(tops)
        a, c = halves(get_row(p, 0, rest))
        b, d = halves(get_row(p, 1, rest))
        first, second = plus(first_bytes(a, b), base, mask), plus(last_bytes(a, b), base, mask)
        third, fourth = plus(first_bytes(c, d), base, mask), plus(last_bytes(c, d), base, mask)
        store16(x, i, (first, second, third, fourth))

    return words, put, join


def _words() -> tuple[Any, Any, Any]:
    @cuda.jit(device=True)
    def words(x, i):
        i = int32(i << int32(1))
        return load16(x, i) + load16(x, int32(i + int32(1)))

    @cuda.jit(device=True)
    def rows(x, i, base):
        a, b, c, d = load16(x, i)
        a, b = uint32(a - base), uint32(b - base)
        return transposed(a, b, uint32(c - base), uint32(d - base))

    @cuda.jit(device=True)
    def put(x, i, low, p):
        base, i = uint32(low), int32(i << int32(1))
        a, b, c, d = rows(x, i, base)
        e, f, g, h = rows(x, int32(i + int32(1)), base)
        first = uint64(put_row(p, 0, pair(a, e)) | put_row(p, 1, pair(b, f)))
        return uint64(first | uint64(put_row(p, 2, pair(c, g)) | put_row(p, 3, pair(d, h))))

    @cuda.jit(device=True)
    def put_words(x, i, base, a, b, c, d):
        a, b, c, d = transposed(a, b, c, d)
        a, b = uint32(a + base), uint32(b + base)
        store16(x, i, (a, b, uint32(c + base), uint32(d + base)))

    @cuda.jit(device=True)
    def join(x, i, low, p, rest):
        base, i = uint32(low), int32(i << int32(1))
        a, e = halves(get_row(p, 0, rest))
        b, f = halves(get_row(p, 1, rest))
        c, g = halves(get_row(p, 2, rest))
        d, h = halves(get_row(p, 3, rest))
        put_words(x, i, base, a, b, c, d)
        put_words(x, int32(i + int32(1)), base, e, f, g, h)

    return words, put, join


def _longs() -> tuple[Any, Any, Any]:
    @cuda.jit(device=True)
    def words(x, i):
        i = int32(i << int32(2))
        return four_longs(x, i) + four_longs(x, int32(i + int32(2)))

    @cuda.jit(device=True)
    def rows(x, i, low):
        # The lower four rows of four words, then the upper four.
        e, f, g, h = four_longs(x, i)
        a, e = halves(uint64(e - low))
        b, f = halves(uint64(f - low))
        c, g = halves(uint64(g - low))
        d, h = halves(uint64(h - low))
        return transposed(a, b, c, d), transposed(e, f, g, h)

    @cuda.jit(device=True)
    def put_four(p, k, a, b):
        first = uint64(put_row(p, k, pair(a[0], b[0])) | put_row(p, k + 1, pair(a[1], b[1])))
        second = uint64(put_row(p, k + 2, pair(a[2], b[2])) | put_row(p, k + 3, pair(a[3], b[3])))
        return uint64(first | second)

    @cuda.jit(device=True)
    def put(x, i, low, p):
        i = int32(i << int32(2))
        a, b = rows(x, i, low)
        c, d = rows(x, int32(i + int32(2)), low)
        rest = put_four(p, 0, a, c)
        if p[3] >= int32(4):
            rest = uint64(rest | put_four(p, 4, b, d))
        return rest

    @cuda.jit(device=True)
    def put_words(x, i, low, lower, upper):
        a, b, c, d = transposed(lower[0], lower[1], lower[2], lower[3])
        e, f, g, h = transposed(upper[0], upper[1], upper[2], upper[3])
        a, e = halves(uint64(pair(a, e) + low))
        b, f = halves(uint64(pair(b, f) + low))
        store16(x, i, (a, e, b, f))
        c, g = halves(uint64(pair(c, g) + low))
        d, h = halves(uint64(pair(d, h) + low))
        store16(x, int32(i + int32(1)), (c, g, d, h))

    @cuda.jit(device=True)
    def get_four(p, k, rest):
        a, e = halves(get_row(p, k, rest))
        b, f = halves(get_row(p, k + 1, rest))
        c, g = halves(get_row(p, k + 2, rest))
        d, h = halves(get_row(p, k + 3, rest))
        return (a, b, c, d), (e, f, g, h)

    @cuda.jit(device=True)
    def join(x, i, low, p, rest):
        i, none = int32(i << int32(2)), uint32(0)
        a, b = get_four(p, 0, rest)
        c = d = (none, none, none, none)
        if p[3] >= int32(4):
            c, d = get_four(p, 4, rest)
        put_words(x, i, low, a, c)
        put_words(x, int32(i + int32(2)), low, b, d)

    return words, put, join


WORDS: Final[dict[int, tuple[Any, Any, Any]]] = {
    1: _bytes(),
    2: _halves(),
    4: _words(),
    8: _longs(),
}
"""By the bytes of a word: (words, put, join)."""
