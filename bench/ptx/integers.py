"""Integer operations of PTX on numpy arrays, a value per thread."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from bench.ptx.faults import UndefinedError

Lanes = NDArray[Any]


def shift_left(a: Lanes, b: Lanes) -> Lanes:
    """shl: 0 from the width of the type on."""
    width, kind = a.dtype.itemsize * 8, a.dtype.type
    by = np.asarray(b).astype(a.dtype)
    return np.asarray(np.where(np.asarray(b) < width, a << (by & kind(width - 1)), kind(0)))


def shift_right(a: Lanes, b: Lanes) -> Lanes:
    """shr: arithmetic for signed types; further than the width is as far as the width."""
    width, kind = a.dtype.itemsize * 8, a.dtype.type
    if a.dtype.kind == "i":
        shifted: Lanes = a >> np.minimum(np.asarray(b), width - 1).astype(a.dtype)
        return shifted
    by = np.asarray(b).astype(a.dtype)
    return np.asarray(np.where(np.asarray(b) < width, a >> (by & kind(width - 1)), kind(0)))


def clz(a: Lanes) -> Lanes:
    """Number of leading zero bits, as u32."""
    a = np.asarray(a)
    if a.dtype.itemsize == 4:
        found: Lanes = (32 - np.frexp(a.astype(np.float64))[1]).astype(np.uint32)
        return found
    high = (a >> np.uint64(32)).astype(np.uint32)
    low = (a & np.uint64(0xFFFFFFFF)).astype(np.uint32)
    return np.where(high != 0, clz(high), np.uint32(32) + clz(low)).astype(np.uint32)


def reverse_bits(a: Lanes) -> Lanes:
    """brev: bit k to bit width - 1 - k."""
    width, kind = a.dtype.itemsize * 8, a.dtype.type
    out = np.zeros_like(a)
    for k in range(width):
        out |= ((a >> kind(k)) & kind(1)) << kind(width - 1 - k)
    return out


def insert_field(a: Lanes, b: Lanes, start: int, length: int) -> Lanes:
    """bfi: b with the low ``length`` bits of a at bit ``start``."""
    kind = np.asarray(b).dtype.type
    mask = kind(((1 << length) - 1) << start & ((1 << 8 * kind().itemsize) - 1))
    found: Lanes = (b & ~mask) | ((a << kind(start)) & mask)
    return found


def extract_field(a: Lanes, start: Lanes, length: Lanes) -> Lanes:
    """bfe: ``length`` bits of a from bit ``start`` on, sign-extended if a is signed."""
    width, is_signed = a.dtype.itemsize * 8, a.dtype.kind == "i"
    start, length = np.asarray(start) & np.uint32(255), np.asarray(length) & np.uint32(255)
    a, start, length = np.broadcast_arrays(a, start, length)
    out = np.empty(a.shape, a.dtype)
    for k in range(a.size):  # rare: no need to be fast
        first, count = int(start.flat[k]), int(length.flat[k])
        value = int(a.flat[k]) & ((1 << width) - 1)
        if is_signed and value >> (width - 1):
            value |= -1 << width
        bits = (value >> first) & ((1 << count) - 1)
        if is_signed and count and value >> min(first + count - 1, width - 1) & 1:
            bits |= -1 << count
        bits &= (1 << width) - 1
        out.flat[k] = bits - (bits >> (width - 1) << width) if is_signed else bits
    return out


def funnel(a: Lanes, b: Lanes, by: Lanes, *, left: bool, clamp: bool) -> Lanes:
    """shf: 64 bits, low word a, high word b, moved; the high word then, or the low one."""
    n = np.minimum(by, np.uint32(32)) if clamp else (np.asarray(by) & np.uint32(31))
    both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
    n = n.astype(np.uint64)
    if not left:
        return (both >> n).astype(np.uint32)
    moved = ((both << n) >> np.uint64(32)).astype(np.uint32)
    return np.where(n == 32, both.astype(np.uint32), moved)


def permute(a: Lanes, b: Lanes, selector: Lanes) -> Lanes:
    """prmt: four bytes of the eight of a and b, or their signs, by four bits each."""
    both = (np.asarray(b).astype(np.uint64) << np.uint64(32)) | np.asarray(a).astype(np.uint64)
    chosen = np.asarray(selector).astype(np.uint64)
    out = np.zeros_like(both)
    for k in range(4):
        nibble = (chosen >> np.uint64(4 * k)) & np.uint64(15)
        byte = (both >> ((nibble & np.uint64(7)) * np.uint64(8))) & np.uint64(255)
        signs = np.where(byte & np.uint64(128), np.uint64(255), np.uint64(0))
        out = out | (np.where(nibble & np.uint64(8), signs, byte) << np.uint64(8 * k))
    return out.astype(np.uint32)


def dot_of_bytes(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """dp4a.u32.u32: c plus the products of the four bytes of a and b."""
    total = np.asarray(c).astype(np.uint32)
    for k in (0, 8, 16, 24):
        one, other = (np.asarray(v) >> np.uint32(k) & np.uint32(255) for v in (a, b))
        total = total + one * other
    return total


def divide(a: Lanes, b: Lanes, line: int) -> Lanes:
    """Integer division, towards zero.

    Raises:
        UndefinedError: by zero.
    """
    if np.any(np.asarray(b) == 0):
        raise UndefinedError(f"{line}: division by zero")
    if np.asarray(a).dtype.kind == "i":
        q = np.abs(a) // np.abs(b)
        return np.where((a < 0) != (b < 0), -q, q).astype(np.asarray(a).dtype)
    quotient: Lanes = a // b
    return quotient


def remainder(a: Lanes, b: Lanes, line: int) -> Lanes:
    """The remainder of `divide`.

    Raises:
        UndefinedError: by zero.
    """
    if np.any(np.asarray(b) == 0):
        raise UndefinedError(f"{line}: remainder of a division by zero")
    return np.fmod(a, b)


def multiply_high(a: Lanes, b: Lanes) -> Lanes:
    """mul.hi: the upper half of the product."""
    a, b = np.broadcast_arrays(a, b)
    width = a.dtype.itemsize * 8
    flat = [(int(x) * int(y)) >> width for x, y in zip(a.flat, b.flat, strict=True)]
    return np.array(flat, a.dtype).reshape(a.shape)


def pack_saturated(a: Lanes, b: Lanes, c: Lanes) -> Lanes:
    """cvt.pack.sat.u8.s32.b32: bytes b and a, each cut to 0 to 255, in front of half of c."""
    low, high = (np.clip(v, 0, 255).astype(np.uint32) for v in (b, a))
    packed: Lanes = low | (high << np.uint32(8)) | (np.asarray(c) << np.uint32(16))
    return packed
