"""``expk``: exponents as 3- or 4-bit distances from the tile's largest; the rest verbatim.

See docs/format/expk.md. Bits in, bits out: NaN payloads, -0.0 and denormals survive.
"""

from __future__ import annotations

import struct
from typing import TYPE_CHECKING, Any

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.planes import (
    get_parts,
    get_parts_reference,
    lowest_bit,
    mask_above,
    parts_bytes,
    put_parts,
    put_parts_reference,
    shl,
    shr,
    whole_groups,
)
from cswap_kernels.words import padded, popcount, prefetch

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER = 16
"""Bytes: u8 k, u8 zero code, u16 largest exponent, u32 escapes, 8 zero."""

NEAR = 14
"""Exponent 0 may have a code of its own only if the largest exponent is above this."""

USUAL = 4
"""More escapes than this in 64 words are rare in tiles that gain from escapes."""

FAR, ZERO = 254, 255
"""Values of c during an encode. FAR: a distance of 254 or more. ZERO: exponent 0."""


@njit(nogil=True, cache=True)
def _rest_bits(mantissa_bits):
    # Sign and mantissa take whole bytes and this number of further bits.
    return (mantissa_bits + 1) & 7


@njit(nogil=True, cache=True)
def _fixed_bytes(n, mantissa_bits, k):
    whole = (mantissa_bits + 1) >> 3
    rest = _rest_bits(mantissa_bits)
    return HEADER + whole * padded(n) + parts_bytes(n, rest) + parts_bytes(n, k)


@njit(nogil=True, cache=True)
def _escape_bytes(exponent_bits):
    return 3 if exponent_bits <= 8 else 4  # u16 position, then u8 or u16 exponent


@njit(nogil=True, cache=True)
def _largest_exponent(words, field):
    word = words.dtype.type
    top = word(0)
    for i in range(words.size):
        top = max(top, word(words[i] & field))
    return top


@njit(nogil=True, cache=True)
def _distances(words, high, mantissa_bits, exponent_bits, c):
    # Distance of each exponent from the largest, at most FAR. ZERO for exponent 0, unless the
    # largest is so small that 0 is near it. c [m] u8 is 0 behind the words.
    word = words.dtype.type
    shift, field = word(mantissa_bits), word((1 << exponent_bits) - 1)
    far, marked = word(FAR), word(ZERO if high > NEAR else high)
    for i in range(words.size):
        exponent = word(shr(words[i], shift) & field)
        below = min(word(high - exponent), far)
        c[i] = np.uint8(marked if exponent == 0 else below)
    c[words.size :] = 0


@njit(nogil=True, cache=True)
def _choose(words, c, mantissa_bits, exponent_bits, forced):
    # Choose the pair (k, zero code) with the fewest bytes; return k, zero code, escapes, bytes.
    n = words.size
    over5, over6, over13, over14, zeros = 0, 0, 0, 0, 0
    for i in range(0, c.size, 64):
        prefetch(words, words, i + n)  # the next tile, while this one is in the cache
        over5 += popcount(mask_above(c, i, np.uint8(5)))
        over6 += popcount(mask_above(c, i, np.uint8(6)))
        over13 += popcount(mask_above(c, i, np.uint8(13)))
        over14 += popcount(mask_above(c, i, np.uint8(14)))
        zeros += popcount(mask_above(c, i, np.uint8(FAR)))
    best = (0, 0, 0, np.int64(1) << 62)
    for k, plain, with_zero in ((3, over6, over5 - zeros), (4, over14, over13 - zeros)):
        if forced not in (0, k):
            continue
        for zero_code in range(2 if zeros else 1):
            escapes = with_zero if zero_code else plain
            nbytes = _fixed_bytes(n, mantissa_bits, k) + escapes * _escape_bytes(exponent_bits)
            if nbytes < best[3]:
                best = (k, zero_code, escapes, nbytes)
    return best


@njit(nogil=True, cache=True)
def _codes(c, n, k, zero_code):
    # Replace distances by codes, in place.
    escape = np.uint8((1 << k) - 1)
    limit = np.uint8(escape - np.uint8(zero_code))
    zero = np.uint8(limit if zero_code else escape)
    for i in range(n):
        near = c[i] if c[i] < limit else escape
        c[i] = zero if c[i] == np.uint8(ZERO) else near


@njit(nogil=True, cache=True)
def _rest(words, i, low, sign, exponent_bits):
    # Sign and mantissa of a word as one number.
    word = words.dtype.type
    return word(word(words[i] & low) | word(shr(words[i], exponent_bits) & sign))


@njit(nogil=True, cache=True)
def _put_rest(words, mantissa_bits, exponent_bits, dst):
    # Write sign and mantissa: byte rows, then the remaining bits; return the byte behind.
    n, word = words.size, words.dtype.type
    low, sign = word((1 << mantissa_bits) - 1), word(1 << mantissa_bits)
    down = word(exponent_bits)
    at = HEADER
    for byte in range((mantissa_bits + 1) >> 3):
        row = dst[at : at + n]
        shift = word(8 * byte)
        for i in range(n):
            row[i] = np.uint8(shr(_rest(words, i, low, sign, down), shift))
        dst[at + n : at + padded(n)] = 0
        at += padded(n)
    bits = _rest_bits(mantissa_bits)
    if bits:
        c = np.zeros(whole_groups(n), np.uint8)
        shift = word((mantissa_bits + 1) & ~7)
        for i in range(n):
            c[i] = np.uint8(shr(_rest(words, i, low, sign, down), shift))
        at = put_parts(c, bits, dst, at)
    return at


@njit(nogil=True, cache=True)
def _find_escapes(c, k, positions):
    # Write the positions of escapes, in order. It may write up to USUAL positions behind them,
    # because a loop that ends at a group's last escape is mispredicted in every group.
    found = 0
    for group in range(0, c.size, 64):
        mask = mask_above(c, group, np.uint8((1 << k) - 2))
        after = found + np.int64(popcount(mask))
        while True:
            for slot in range(USUAL):
                positions[found + slot] = np.uint16(group + lowest_bit(mask))
                mask &= mask - np.uint64(1)
            if mask == 0:
                break
            found += USUAL
        found = after


@njit(nogil=True, cache=True)
def _put_escapes(words, c, k, shift, field, dst, at, count):
    # Positions (u16), then exponents (u8, or u16 if field needs it), in order.
    positions = dst[at : at + 2 * (count + USUAL)].view(np.uint16)
    exponents = dst[at + 2 * count :]
    _find_escapes(c, k, positions)
    wide = field > 255
    for j in range(count):
        exponent = shr(words[positions[j]], shift) & field
        if wide:
            exponents[2 * j] = np.uint8(exponent)
            exponents[2 * j + 1] = np.uint8(exponent >> words.dtype.type(8))
        else:
            exponents[j] = np.uint8(exponent)


@njit(nogil=True, cache=True)
def expk_encode_cpu(words, dst, args, first):
    """See tiles.py; args: exponent bits, mantissa bits, k or 0 for the cheaper."""
    n = words.size
    exponent_bits, mantissa_bits = np.int64(args[0]), np.int64(args[1])
    shift = words.dtype.type(mantissa_bits)
    field = words.dtype.type((1 << exponent_bits) - 1)
    high = words.dtype.type(_largest_exponent(words, words.dtype.type(field << shift)) >> shift)
    c = np.empty(whole_groups(n), np.uint8)
    _distances(words, high, mantissa_bits, exponent_bits, c)
    k, zero_code, escapes, nbytes = _choose(
        words, c, mantissa_bits, exponent_bits, np.int64(args[2])
    )
    if nbytes >= n * words.itemsize:
        return -1
    dst[:HEADER] = 0
    dst[0], dst[1] = k, zero_code
    dst[2:4].view(np.uint16)[0] = np.uint16(high)
    dst[4:8].view(np.uint32)[0] = np.uint32(escapes)
    at = _put_rest(words, mantissa_bits, exponent_bits, dst)
    _codes(c, n, k, zero_code)
    at = put_parts(c, k, dst, at)
    if escapes:
        _put_escapes(words, c, k, shift, field, dst, at, escapes)
    return nbytes


@njit(nogil=True, cache=True)
def _get_escapes(src, at, count, code, shift, field, c, words):
    # Set the exponents of escaped words. Returns False unless the positions are exactly those of
    # the words with the escape code, in order.
    coded = 0
    for group in range(0, c.size, 64):
        coded += popcount(mask_above(c, group, np.uint8(code - 1)))
    if coded != count:
        return False
    positions = src[at : at + 2 * count].view(np.uint16)
    values = src[at + 2 * count :]
    wide = field > 255
    others = words.dtype.type(~(field << shift))
    last = -1
    for j in range(count):
        i = np.int64(positions[j])
        if i <= last or i >= words.size or c[i] != code:
            return False
        last = i
        exponent = words.dtype.type(values[j])
        if wide:
            exponent = words.dtype.type(values[2 * j])
            exponent |= words.dtype.type(values[2 * j + 1]) << words.dtype.type(8)
        words[i] = (words[i] & others) | ((exponent & field) << shift)
    return True


@njit(nogil=True, cache=True)
def expk_decode_cpu(src, words, args, first):
    """See tiles.py."""
    n = words.size
    exponent_bits, mantissa_bits = np.int64(args[0]), np.int64(args[1])
    if src.size < HEADER or src[0] < 3 or src[0] > 4 or src[1] > 1:
        return -1
    k, zero_code = np.int64(src[0]), np.int64(src[1])
    high = words.dtype.type(src[2:4].view(np.uint16)[0])
    escapes = np.int64(src[4:8].view(np.uint32)[0])
    nbytes = _fixed_bytes(n, mantissa_bits, k)
    if src.size != nbytes + escapes * _escape_bytes(exponent_bits) or high >> exponent_bits:
        return -1
    at = _get_rest(src, words, mantissa_bits)
    c = np.empty(whole_groups(n), np.uint8)
    at = get_parts(src, at, k, c)
    c[n:] = 0  # src may hold any bytes behind the words
    zero = np.uint8((1 << k) - 2 if zero_code else ZERO)
    _join(words, c, high, zero, mantissa_bits, exponent_bits)
    shift = words.dtype.type(mantissa_bits)
    field = words.dtype.type((1 << exponent_bits) - 1)
    code = np.uint8((1 << k) - 1)
    return 0 if _get_escapes(src, at, escapes, code, shift, field, c, words) else -1


@njit(nogil=True, cache=True)
def _get_rest(src, words, mantissa_bits):
    # Inverse of _put_rest, except that the sign stays next to the mantissa; returns the byte
    # behind. There is at least one whole byte, because the codec takes no words of one byte.
    n, word = words.size, words.dtype.type
    at = HEADER
    for i in range(n):
        words[i] = word(src[at + i])
    at += padded(n)
    for byte in range(1, (mantissa_bits + 1) >> 3):
        row = src[at : at + n]
        shift = word(8 * byte)
        for i in range(n):
            words[i] |= shl(word(row[i]), shift)
        at += padded(n)
    bits = _rest_bits(mantissa_bits)
    if bits:
        c = np.empty(whole_groups(n), np.uint8)
        at = get_parts(src, at, bits, c)
        shift = word((mantissa_bits + 1) & ~7)
        for i in range(n):
            words[i] |= shl(word(c[i]), shift)
    return at


@njit(nogil=True, cache=True)
def _join(words, c, high, zero, mantissa_bits, exponent_bits):
    # Combine the words of _get_rest with the codes. Escaped words get a wrong exponent here, which
    # _get_escapes replaces.
    word = words.dtype.type
    low, sign = word((1 << mantissa_bits) - 1), word(1 << mantissa_bits)
    up, shift = word(exponent_bits), word(mantissa_bits)
    field = word((1 << exponent_bits) - 1)
    for i in range(words.size):
        exponent = word(0) if c[i] == zero else word(word(high - word(c[i])) & field)
        rest = word(word(words[i] & low) | shl(word(words[i] & sign), up))
        words[i] = rest | shl(exponent, shift)


def expk_encode_reference(
    words: NDArray[Any], exponent_bits: int, mantissa_bits: int, forced: int = 0
) -> bytes | None:
    """One tile by the text of docs/format/expk.md; None if it would not shrink."""
    exponents = [int(w) >> mantissa_bits & (1 << exponent_bits) - 1 for w in words]
    best: bytes | None = None
    for k in (3, 4) if forced == 0 else (forced,):
        for zero_code in (0, 1) if max(exponents) > NEAR and 0 in exponents else (0,):
            out = _encode_as(words, exponents, exponent_bits, mantissa_bits, k, zero_code)
            best = out if best is None or len(out) < len(best) else best
    return best if best is not None and len(best) < words.nbytes else None


def _encode_as(
    words: NDArray[Any], exponents: list[int], e: int, t: int, k: int, zero_code: int
) -> bytes:
    # A tile with codes of k bits. e, t: exponent and mantissa bits. A code is the exponent's
    # distance from the largest. The highest code is the escape; with zero_code, the next lower
    # code stands for exponent 0. Distances that reach these codes are escaped.
    high, escape = max(exponents), (1 << k) - 1
    codes = [
        escape - 1
        if zero_code and E == 0
        else high - E
        if high - E < escape - zero_code
        else escape
        for E in exponents
    ]
    escaped = [i for i, code in enumerate(codes) if code == escape]
    out = bytes([k, zero_code]) + high.to_bytes(2, "little")
    out += len(escaped).to_bytes(4, "little") + bytes(8)
    # The sign moves down next to the mantissa: t + 1 bits. Their whole bytes go to byte rows,
    # padded to 16; the remaining bits go to bit planes.
    rest = [int(w) & (1 << t) - 1 | int(w) >> e & 1 << t for w in words]
    for byte in range((t + 1) // 8):
        out += bytes(r >> 8 * byte & 255 for r in rest) + bytes(-len(rest) % 16)
    over = np.array([r >> (t + 1) // 8 * 8 & 255 for r in rest], np.uint8)
    out += put_parts_reference(over, (t + 1) % 8)
    out += put_parts_reference(np.array(codes, np.uint8), k)
    out += b"".join(i.to_bytes(2, "little") for i in escaped)
    return out + b"".join(exponents[i].to_bytes(1 if e <= 8 else 2, "little") for i in escaped)


def expk_decode_reference(
    stream: bytes, like: NDArray[Any], exponent_bits: int, mantissa_bits: int
) -> None:
    """Decode a segment into the words of ``like``.

    Raises:
        ValueError: the segment is not an encoding of this number of words.
    """
    e, t, n = exponent_bits, mantissa_bits, like.size
    k, zero_code, high, x = struct.unpack_from("<BBHI", stream.ljust(HEADER, b"\0"))
    wide, whole, row = 1 if e <= 8 else 2, (t + 1) // 8, -(-n // 16) * 16
    tail = HEADER + whole * row + sum(parts_bytes(n, bits) for bits in ((t + 1) % 8, k))
    if k not in (3, 4) or zero_code > 1 or high >> e or len(stream) != tail + (2 + wide) * x:
        raise ValueError("header or length")
    over, at = get_parts_reference(stream, HEADER + whole * row, (t + 1) % 8, n)
    codes, at = get_parts_reference(stream, at, k, n)
    positions = [int.from_bytes(stream[at + 2 * j :][:2], "little") for j in range(x)]
    if positions != [i for i, code in enumerate(codes) if code == (1 << k) - 1]:
        raise ValueError("escapes")
    field = (1 << e) - 1
    exponents = [0 if zero_code and c == (1 << k) - 2 else high - c & field for c in codes]
    for j, i in enumerate(positions):
        exponents[i] = int.from_bytes(stream[at + 2 * x + wide * j :][:wide], "little") & field
    for i in range(n):
        rest = sum(stream[HEADER + row * byte + i] << 8 * byte for byte in range(whole))
        rest |= over[i] << 8 * whole
        like[i] = rest & (1 << t) - 1 | (rest >> t) << e + t | exponents[i] << t
