"""Words as ``expk`` takes them apart and joins them, eight at a time; see cswap_kernels/expk.py.

For each layout of a float's bits there are device functions:

    peak(x, i) -> i32
        The largest exponent of eight words of x, the i-th eight.
    distances(x, i, high, marks) -> two quads (quads.py)
        By how much the exponent of each of them lies below the largest one of the tile: at most
        254, and 255 for exponent 0. high: `every` of the largest exponent, or that exponent itself
        where `WIDE` says so; marks: FULL if exponent 0 is told from the others, else 0.
    put_rest(x, i, dst, row) -> u64
        Write the whole bytes of sign and mantissa: rows of ``row`` bytes. The bits that are left.
    join(src, row, j, codes, rest, high, zero, x, i)
        Write the i-th eight words of x: from the j-th eight bytes of each row, the codes (u64), the
        bits that are left (u64).
        zero: the code of exponent 0, or NO_CODE.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from numba import cuda, int32, uint32, uint64

from cswap_kernels.cuda.primitives import as_u32, as_u64, load16, permuting, store16
from cswap_kernels.cuda.quads import (
    FLAGS,
    LOW,
    even_bytes,
    first_bytes,
    full,
    halves,
    last_bytes,
    low_halves,
    odd_bytes,
    pair,
    transposed,
)
from cswap_kernels.expk import FAR, HEADER, ZERO

NO_CODE: Final = 0x40
"""No code: codes have up to 4 bits."""

_FIRST = HEADER >> 3

lowest_bytes, top_bytes = permuting(0x0040), permuting(0x0073)


@dataclass(frozen=True, slots=True)
class Layout:
    """A float's bits, and the functions of this module for it.

    Attributes:
        exponent_bits: 5 to 11.
        mantissa_bits: below them.
        functions: (peak, distances, put_rest, join).
    """

    exponent_bits: int
    mantissa_bits: int
    functions: tuple[Any, Any, Any, Any]

    @property
    def rows(self) -> int:
        """Whole bytes of sign and mantissa."""
        return (self.mantissa_bits + 1) // 8

    @property
    def rest_bits(self) -> int:
        """Bits of them that are left."""
        return (self.mantissa_bits + 1) % 8

    @property
    def wide(self) -> bool:
        """Whether an exponent has more than 8 bits."""
        return self.exponent_bits > 8


@cuda.jit(device=True)
def from_exponents(exponents, high, marks):
    """`distances` of four words from the quad of their exponents."""
    nonzero = full(uint32(uint32(uint32(exponents & uint32(LOW)) + uint32(LOW)) | exponents))
    return uint32(uint32(high - exponents) | uint32(uint32(~nonzero) & marks))


@cuda.jit(device=True)
def to_exponents(codes, high, zero):
    """The quad of four words' exponents, modulo 256, from their codes; all three are quads."""
    difference = uint32(uint32(high | uint32(FLAGS)) - codes)  # no byte borrows
    difference = uint32(difference ^ uint32(uint32(~high) & uint32(FLAGS)))
    other = full(uint32(uint32(codes ^ zero) + uint32(LOW)))  # codes are below 128
    return uint32(difference & other)


@cuda.jit(device=True)
def larger(a, b):
    """The larger of two u32."""
    return a if a > b else b


def _bfloat16() -> Layout:
    low, sign = 0x007F007F, 0x00800080

    @cuda.jit(device=True)
    def peak(x, i):
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
        return odd_bytes(uint32(a << uint32(1)), uint32(b << uint32(1)))

    @cuda.jit(device=True)
    def distances(x, i, high, marks):
        a, b, c, d = load16(x, i)
        first = from_exponents(exponents(a, b), high, marks)
        return first, from_exponents(exponents(c, d), high, marks)

    @cuda.jit(device=True)
    def rest(a, b):
        a = uint32(uint32(a & uint32(low)) | uint32(uint32(a >> uint32(8)) & uint32(sign)))
        b = uint32(uint32(b & uint32(low)) | uint32(uint32(b >> uint32(8)) & uint32(sign)))
        return even_bytes(a, b)

    @cuda.jit(device=True)
    def put_rest(x, i, dst, row):
        a, b, c, d = load16(x, i)
        if int32(i << int32(3)) < row:
            as_u64(dst)[int32(int32(_FIRST) + i)] = pair(rest(a, b), rest(c, d))
        return uint64(0)

    def joining(rest_digits: int, digits: int) -> Any:
        # Of two words, by where bytes of the rest and of the exponents go.
        own_rest, own_exponents = permuting(rest_digits), permuting(digits)

        @cuda.jit(device=True)
        def two(rest, exponents):
            bits = uint32(own_rest(rest, rest) & uint32(0x807F807F))
            return uint32(bits | uint32(own_exponents(exponents, uint32(0)) << uint32(7)))

        return two

    first_two, last_two = joining(0x1100, 0x4140), joining(0x3322, 0x4342)

    @cuda.jit(device=True)
    def join(src, row, j, codes, rest, high, zero, x, i):
        low_codes, high_codes = halves(codes)
        e, f = to_exponents(low_codes, high, zero), to_exponents(high_codes, high, zero)
        r, s = halves(uint64(as_u64(src)[int32(int32(_FIRST) + j)]))
        store16(x, i, (first_two(r, e), last_two(r, e), first_two(s, f), last_two(s, f)))

    return Layout(8, 7, (peak, distances, put_rest, join))


def _float16() -> Layout:
    field, low, sign = 0x001F001F, 0x03FF03FF, 0x04000400

    @cuda.jit(device=True)
    def exponents(a, b):
        a = uint32(uint32(a >> uint32(10)) & uint32(field))
        b = uint32(uint32(b >> uint32(10)) & uint32(field))
        return even_bytes(a, b)

    @cuda.jit(device=True)
    def peak(x, i):
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
        a, b, c, d = load16(x, i)
        first = from_exponents(exponents(a, b), high, marks)
        return first, from_exponents(exponents(c, d), high, marks)

    @cuda.jit(device=True)
    def rest(w):
        return uint32(uint32(w & uint32(low)) | uint32(uint32(w >> uint32(5)) & uint32(sign)))

    @cuda.jit(device=True)
    def put_rest(x, i, dst, row):
        a, b, c, d = load16(x, i)
        a, b, c, d = rest(a), rest(b), rest(c), rest(d)
        bytes_ab, bytes_cd = even_bytes(a, b), even_bytes(c, d)
        if int32(i << int32(3)) < row:
            as_u64(dst)[int32(int32(_FIRST) + i)] = pair(bytes_ab, bytes_cd)
        return pair(odd_bytes(a, b), odd_bytes(c, d))

    def joining(own_rest: Any, digits: int) -> Any:
        # Of two words, by where bytes of the row and the rest, and of the exponents go.
        own_exponents = permuting(digits)

        @cuda.jit(device=True)
        def two(row, rest, exponents):
            bits = own_rest(row, rest)
            up = uint32(own_exponents(exponents, uint32(0)) & uint32(field))
            moved = uint32(uint32(bits & uint32(sign)) << uint32(5))
            return uint32(uint32(uint32(bits & uint32(low)) | moved) | uint32(up << uint32(10)))

        return two

    first_two, last_two = joining(first_bytes, 0x4140), joining(last_bytes, 0x4342)

    @cuda.jit(device=True)
    def join(src, row, j, codes, rest, high, zero, x, i):
        low_codes, high_codes = halves(codes)
        e, f = to_exponents(low_codes, high, zero), to_exponents(high_codes, high, zero)
        r, s = halves(uint64(as_u64(src)[int32(int32(_FIRST) + j)]))
        v, w = halves(rest)
        a, b = first_two(r, v, e), last_two(r, v, e)
        store16(x, i, (a, b, first_two(s, w, f), last_two(s, w, f)))

    return Layout(5, 10, (peak, distances, put_rest, join))


def _float32() -> Layout:
    field, low, sign = 0x7F800000, 0x007FFFFF, 0x00800000

    @cuda.jit(device=True)
    def four_peak(x, i):
        a, b, c, d = load16(x, i)
        a, b = uint32(a & uint32(field)), uint32(b & uint32(field))
        return larger(larger(a, b), larger(uint32(c & uint32(field)), uint32(d & uint32(field))))

    @cuda.jit(device=True)
    def peak(x, i):
        i = int32(i << int32(1))
        return int32(larger(four_peak(x, i), four_peak(x, int32(i + int32(1)))) >> uint32(23))

    @cuda.jit(device=True)
    def exponents(x, i):
        a, b, c, d = load16(x, i)
        ab = top_bytes(uint32(a << uint32(1)), uint32(b << uint32(1)))
        cd = top_bytes(uint32(c << uint32(1)), uint32(d << uint32(1)))
        return low_halves(ab, cd)

    @cuda.jit(device=True)
    def distances(x, i, high, marks):
        i = int32(i << int32(1))
        first = from_exponents(exponents(x, i), high, marks)
        return first, from_exponents(exponents(x, int32(i + int32(1))), high, marks)

    @cuda.jit(device=True)
    def rest(w):
        return uint32(uint32(w & uint32(low)) | uint32(uint32(w >> uint32(8)) & uint32(sign)))

    @cuda.jit(device=True)
    def put_rest(x, i, dst, row):
        a, b, c, d = load16(x, int32(i << int32(1)))
        e, f, g, h = load16(x, int32(int32(i << int32(1)) + int32(1)))
        a, b, c, _ = transposed(rest(a), rest(b), rest(c), rest(d))
        e, f, g, _ = transposed(rest(e), rest(f), rest(g), rest(h))
        if int32(i << int32(3)) < row:
            rows, step = as_u64(dst), int32(row >> int32(3))
            at = int32(int32(_FIRST) + i)
            rows[at] = pair(a, e)
            rows[int32(at + step)] = pair(b, f)
            rows[int32(at + int32(step << int32(1)))] = pair(c, g)
        return uint64(0)

    @cuda.jit(device=True)
    def one(w):
        # The exponent is in the upper byte of w, above sign and mantissa.
        upper = uint32(uint32(w >> uint32(1)) & uint32(field))
        return uint32(
            uint32(upper | uint32(w & uint32(low))) | uint32(uint32(w & uint32(sign)) << uint32(8))
        )

    @cuda.jit(device=True)
    def join(src, row, j, codes, rest, high, zero, x, i):
        low_codes, high_codes = halves(codes)
        e, f = to_exponents(low_codes, high, zero), to_exponents(high_codes, high, zero)
        rows, step, at = as_u64(src), int32(row >> int32(3)), int32(int32(_FIRST) + j)
        a, r = halves(uint64(rows[at]))
        b, s = halves(uint64(rows[int32(at + step)]))
        c, t = halves(uint64(rows[int32(at + int32(step << int32(1)))]))
        a, b, c, e = transposed(a, b, c, e)
        r, s, t, f = transposed(r, s, t, f)
        i = int32(i << int32(1))
        store16(x, i, (one(a), one(b), one(c), one(e)))
        store16(x, int32(i + int32(1)), (one(r), one(s), one(t), one(f)))

    return Layout(8, 23, (peak, distances, put_rest, join))


def _float64() -> Layout:
    field, low, sign = 0x7FF, 0x000FFFFF, 0x00100000

    @cuda.jit(device=True)
    def exponent(upper):
        return int32(uint32(upper >> uint32(20)) & uint32(field))

    @cuda.jit(device=True)
    def peak(x, i):
        top = int32(0)
        for k in range(4):
            _, a, _, b = load16(x, int32(int32(i << int32(2)) + int32(k)))
            top = int32(max(top, int32(max(exponent(a), exponent(b)))))
        return top

    @cuda.jit(device=True)
    def distance(upper, high, marks):
        e = exponent(upper)
        below = uint32(min(int32(high - e), int32(FAR)))
        if e == int32(0) and marks != uint32(0):
            below = uint32(ZERO)
        return below

    @cuda.jit(device=True)
    def four(x, i, high, marks):
        _, a, _, b = load16(x, i)
        _, c, _, d = load16(x, int32(i + int32(1)))
        ab = lowest_bytes(distance(a, high, marks), distance(b, high, marks))
        cd = lowest_bytes(distance(c, high, marks), distance(d, high, marks))
        return low_halves(ab, cd)

    @cuda.jit(device=True)
    def distances(x, i, high, marks):
        i = int32(i << int32(2))
        return four(x, i, high, marks), four(x, int32(i + int32(2)), high, marks)

    @cuda.jit(device=True)
    def rest(upper):
        moved = uint32(uint32(upper >> uint32(11)) & uint32(sign))
        return uint32(uint32(upper & uint32(low)) | moved)

    @cuda.jit(device=True)
    def put_four(x, i, dst, at, step, inside):
        # Rows of four words; the quad of the bits that are left.
        a, b, c, d = load16(x, i)
        e, f, g, h = load16(x, int32(i + int32(1)))
        a, c, e, g = transposed(a, c, e, g)
        b, d, f, h = transposed(rest(b), rest(d), rest(f), rest(h))
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
        words, step, inside = as_u32(dst), int32(row >> int32(2)), int32(i << int32(3)) < row
        at, k = int32(int32(HEADER >> 2) + int32(i << int32(1))), int32(i << int32(2))
        first = put_four(x, k, words, at, step, inside)
        k, at = int32(k + int32(2)), int32(at + int32(1))
        return pair(first, put_four(x, k, words, at, step, inside))

    @cuda.jit(device=True)
    def upper_of(s, code, high, zero):
        e = int32(0)
        if code != zero:
            e = int32(int32(high - int32(code)) & int32(field))
        moved = uint32(uint32(s & uint32(sign)) << uint32(11))
        return uint32(uint32(uint32(s & uint32(low)) | moved) | uint32(uint32(e) << uint32(20)))

    @cuda.jit(device=True)
    def join_four(src, at, step, codes, rest, high, zero, x, i):
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
        words, step = as_u32(src), int32(row >> int32(2))
        at, k = int32(int32(HEADER >> 2) + int32(j << int32(1))), int32(i << int32(2))
        first, second = halves(codes)
        v, w = halves(rest)
        join_four(words, at, step, first, v, high, zero, x, k)
        k, at = int32(k + int32(2)), int32(at + int32(1))
        join_four(words, at, step, second, w, high, zero, x, k)

    return Layout(11, 52, (peak, distances, put_rest, join))


LAYOUTS: Final[dict[int, tuple[Layout, ...]]] = {
    2: (_bfloat16(), _float16()),
    4: (_float32(),),
    8: (_float64(),),
}
"""Layouts of words of so many bytes."""
