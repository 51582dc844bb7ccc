"""Words as ``expk`` takes them apart and joins them, eight at a time; see cswap_kernels/expk.py.

For each layout of a float's bits a module has device functions (expk_bfloat16.py and so on):

    peak(x, i) -> i32
        The largest exponent of eight words of x, the i-th eight.
    distances(x, i, high, marks) -> two quads (quads.py)
        By how much the exponent of each of them lies below the largest one of the tile: at most
        254, and 255 for exponent 0. high: `every` of the largest exponent; marks: FULL if exponent
        0 is told from the others, else 0.
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

from numba import cuda, int32, uint32

from cswap_kernels.cuda.planes import parts_bytes
from cswap_kernels.cuda.primitives import unsigned
from cswap_kernels.cuda.quads import FLAGS, LOW, full
from cswap_kernels.cuda.warps import padded
from cswap_kernels.expk import HEADER, NEAR

NO_CODE: Final = 0x40
"""No code: codes have up to 4 bits."""

FIRST: Final = HEADER >> 3
"""Index of the first eight bytes behind the header."""


@dataclass(frozen=True, slots=True)
class Layout:
    """A float's bits, and the functions for it.

    Attributes:
        exponent_bits: 5 or 8.
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


@cuda.jit(device=True)
def sections(n, rows, rest_bits):
    """Bytes at which the bits that are left and the codes begin, behind so many rows."""
    rest_at = int32(int32(HEADER) + int32(rows * padded(n)))
    return rest_at, int32(rest_at + parts_bytes(n, rest_bits))


@cuda.jit(device=True)
def marks_of(high):
    """The ``marks`` of a tile by its largest exponent."""
    # A number: a comparison would cost an instruction for each quad.
    return unsigned(int32(int32(int32(NEAR) - high) >> int32(31)))
