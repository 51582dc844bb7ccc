"""Bit planes: a field of a few bits per word, spread over byte rows. See docs/format/bitpack.md.

A *part* of 1, 2 or 4 bits of m words (m a multiple of 8) takes m * bits / 8 bytes: byte j holds the
bits of words j, j + q, j + 2 q, ... from its low end up, with q = m * bits / 8. Neighbours in
memory stay neighbours, so packing and unpacking are plain vector loops. A field of b bits is its
whole bytes, then the parts 4, 2, 1 that add up to b % 8; each starts at a multiple of 16 bytes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numba import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray


@njit(nogil=True, cache=True)
def padded(n):
    """The next multiple of 16."""
    return (n + 15) & ~15


@njit(nogil=True, cache=True)
def parts_bytes(n, bits):
    """Bytes of the parts of a field of ``bits`` (0 to 7) bits of n words."""
    m = (n + 7) & ~7
    total = 0
    for width in (4, 2, 1):
        if bits & width:
            total += padded(m * width // 8)
    return total


@njit(nogil=True, cache=True)
def put_parts(c, bits, dst, at):
    """Pack the low ``bits`` (0 to 7) bits of c [m] u8, zero above n; return the byte behind."""
    m = c.size
    shift = np.uint8(0)
    if bits & 4:
        q = m // 2
        row = dst[at : at + q]
        for j in range(q):
            row[j] = (c[j] & np.uint8(15)) | (c[j + q] << np.uint8(4))
        at = _pad(dst, at, q)
        shift = np.uint8(4)
    if bits & 2:
        q = m // 4
        row = dst[at : at + q]
        for j in range(q):
            row[j] = (
                ((c[j] >> shift) & np.uint8(3))
                | (((c[j + q] >> shift) & np.uint8(3)) << np.uint8(2))
                | (((c[j + 2 * q] >> shift) & np.uint8(3)) << np.uint8(4))
                | (((c[j + 3 * q] >> shift) & np.uint8(3)) << np.uint8(6))
            )
        at = _pad(dst, at, q)
        shift += np.uint8(2)
    if bits & 1:
        q = m // 8
        row = dst[at : at + q]
        for j in range(q):
            row[j] = (c[j] >> shift) & np.uint8(1)
        for b in range(1, 8):
            column = c[b * q : (b + 1) * q]
            for j in range(q):
                row[j] |= ((column[j] >> shift) & np.uint8(1)) << np.uint8(b)
        at = _pad(dst, at, q)
    return at


@njit(nogil=True, cache=True)
def get_parts(src, at, bits, c):
    """Inverse of `put_parts`: write c [m] u8; return the byte behind."""
    m = c.size
    shift = np.uint8(0)
    if bits & 4 == 0:
        c[:] = 0
    else:
        q = m // 2
        row = src[at : at + q]
        for j in range(q):
            c[j] = row[j] & np.uint8(15)
            c[j + q] = row[j] >> np.uint8(4)
        at += padded(q)
        shift = np.uint8(4)
    if bits & 2:
        q = m // 4
        row = src[at : at + q]
        for b in range(4):
            column = c[b * q : (b + 1) * q]
            for j in range(q):
                column[j] |= ((row[j] >> np.uint8(2 * b)) & np.uint8(3)) << shift
        at += padded(q)
        shift += np.uint8(2)
    if bits & 1:
        q = m // 8
        row = src[at : at + q]
        for b in range(8):
            column = c[b * q : (b + 1) * q]
            for j in range(q):
                column[j] |= ((row[j] >> np.uint8(b)) & np.uint8(1)) << shift
        at += padded(q)
    return at


@njit(nogil=True, cache=True)
def _pad(dst, at, q):
    # Zero the bytes up to the next multiple of 16; return where that is.
    end = at + padded(q)
    for i in range(at + q, end):
        dst[i] = 0
    return end


def put_parts_reference(c: NDArray[np.uint8], bits: int) -> bytes:
    """What `put_parts` writes for the fields c [n], word by word."""
    m = -(-c.size // 8) * 8
    fields = [*c.tolist(), *[0] * (m - c.size)]
    out, shift = b"", 0
    for width in (4, 2, 1):
        if bits & width:
            q = m * width // 8
            row = bytearray(-(-q // 16) * 16)
            for i, field in enumerate(fields):
                row[i % q] |= (field >> shift & (1 << width) - 1) << i // q * width
            out, shift = out + bytes(row), shift + width
    return out
