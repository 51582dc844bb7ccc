"""``bitpack``: integers as their distance from the tile's smallest, in the fewest bits.

See docs/format/bitpack.md. Serves bools as well: distance 0 or 1, one bit.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.planes import (
    get_parts,
    get_parts_reference,
    mask_above,
    mask_put,
    parts_bytes,
    put_parts,
    put_parts_reference,
    shl,
    shr,
    whole_groups,
)
from cswap_kernels.words import load_mask, padded, popcount, store_mask, word_bytes

if TYPE_CHECKING:
    from numpy.typing import NDArray

HEADER = 16
"""Bytes: u8 width, 7 zero, u64 smallest (sign bit flipped if signed)."""


@njit(nogil=True, cache=True)
def _encoded_bytes(n, width):
    return HEADER + (width >> 3) * padded(n) + parts_bytes(n, width & 7)


@njit(nogil=True, cache=True)
def _flags_encode(words, dst):
    # Encode bytes that are all 0 or 1, in one pass: returns the size, or -1 if other bytes occur.
    n = words.size
    full = n & ~63
    ones, other = 0, np.uint64(0)
    for i in range(0, full, 64):
        mask = mask_above(words, i, np.uint8(0))
        other |= mask_above(words, i, np.uint8(1))
        store_mask(dst, HEADER + (i >> 3), mask)
        ones += popcount(mask)
    if full < n:
        mask = np.uint64(0)
        for j in range(n - full):
            other |= np.uint64(words[full + j] > 1)
            mask |= np.uint64(words[full + j] != 0) << np.uint64(j)
        store_mask(dst, HEADER + (full >> 3), mask)
        ones += popcount(mask)
    if other:
        return -1
    dst[:HEADER] = 0
    if ones in (0, n):
        dst[8] = ones != 0
        return HEADER
    dst[0] = 1
    end = HEADER + (whole_groups(n) >> 3)
    nbytes = _encoded_bytes(n, 1)
    dst[end:nbytes] = 0
    return nbytes


@njit(nogil=True, cache=True)
def _flags_decode(src, words):
    # Inverse of _flags_encode for tiles that hold both 0 and 1.
    full = words.size & ~63
    for i in range(0, full, 64):
        mask_put(words, i, load_mask(src, HEADER + (i >> 3)))
    for i in range(full, words.size):
        words[i] = (src[HEADER + (i >> 3)] >> np.uint8(i & 7)) & np.uint8(1)


@njit(nogil=True, cache=True)
def _range(words, flip):
    # Smallest and largest word, after the flip.
    word = words.dtype.type
    low = word(words[0] ^ flip)
    high = low
    for i in range(words.size):
        value = word(words[i] ^ flip)
        low, high = min(low, value), max(high, value)
    return low, high


@njit(nogil=True, cache=True)
def _distance_bytes(words, flip, low, shift, row):
    # The byte at ``shift`` of every word's distance from the smallest.
    word = words.dtype.type
    for i in range(words.size):
        row[i] = np.uint8(shr(word(word(words[i] ^ flip) - low), shift))


@njit(nogil=True, cache=True)
def bitpack_encode_cpu(words, dst, args, first):
    """See tiles.py; args[0] is the sign bit of signed words, else 0."""
    n, word = words.size, words.dtype.type
    flip = word(args[0])
    if word_bytes(words) == 1 and flip == 0:
        nbytes = _flags_encode(words, dst)
        if nbytes >= 0:
            return nbytes if nbytes < n else -1
    low, high = _range(words, flip)
    width = 0
    while width < 64 and np.uint64(high - low) >> np.uint64(width):
        width += 1
    nbytes = _encoded_bytes(n, width)
    if nbytes >= n * words.itemsize:
        return -1
    dst[:HEADER] = 0
    dst[0] = width
    dst[8:16].view(np.uint64)[0] = np.uint64(low)
    at = HEADER
    for byte in range(width >> 3):
        _distance_bytes(words, flip, low, word(8 * byte), dst[at : at + n])
        dst[at + n : at + padded(n)] = 0
        at += padded(n)
    if width & 7:
        c = np.empty(whole_groups(n), np.uint8)
        _distance_bytes(words, flip, low, word(width & ~7), c)
        c[n:] = 0
        put_parts(c, width & 7, dst, at)
    return nbytes


@njit(nogil=True, cache=True)
def bitpack_decode_cpu(src, words, args, first):
    """See tiles.py."""
    n, word = words.size, words.dtype.type
    if src.size < HEADER or src[0] > 8 * words.itemsize:
        return -1
    width = np.int64(src[0])
    if src.size != _encoded_bytes(n, width):
        return -1
    flip = word(args[0])
    low = word(src[8:16].view(np.uint64)[0])
    if word_bytes(words) == 1 and width == 1 and flip == 0 and low == 0:
        _flags_decode(src, words)
        return 0
    last = (width - 1) >> 3  # the byte with the highest bits
    if last < 0:
        words[:] = low ^ flip
    at = HEADER
    for byte in range(width >> 3):
        row = src[at : at + n]
        _add_bytes(row, byte, byte == last, low, flip, words)
        at += padded(n)
    if width & 7:
        c = np.empty(whole_groups(n), np.uint8)
        get_parts(src, at, width & 7, c)
        _add_bytes(c[:n], last, True, low, flip, words)
    return 0


@njit(nogil=True, cache=True)
def _add_bytes(row, byte, is_last, low, flip, words):
    # Add one byte to every word's distance from the smallest; the last byte completes the words.
    word = words.dtype.type
    shift = word(8 * byte)
    if not is_last:
        if byte == 0:
            for i in range(words.size):
                words[i] = word(row[i])
        else:
            for i in range(words.size):
                words[i] |= shl(word(row[i]), shift)
    elif byte == 0:
        for i in range(words.size):
            words[i] = word(word(row[i]) + low) ^ flip
    else:
        for i in range(words.size):
            words[i] = word(word(words[i] | shl(word(row[i]), shift)) + low) ^ flip


def bitpack_encode_reference(words: NDArray[Any], flip: int) -> bytes | None:
    """One tile by the text of docs/format/bitpack.md; None if it would not shrink."""
    values = [int(w) ^ flip for w in words]
    low = min(values)
    width = (max(values) - low).bit_length()
    out = bytes([width]) + bytes(7) + low.to_bytes(8, "little")
    n = len(values)
    for byte in range(width // 8):
        row = bytes((v - low) >> 8 * byte & 255 for v in values)
        out += row + bytes(-n % 16)
    top = np.array([(v - low) >> width // 8 * 8 & 255 for v in values], np.uint8)
    out += put_parts_reference(top, width % 8)
    return out if len(out) < n * words.itemsize else None


def bitpack_decode_reference(stream: bytes, n: int, word: int, flip: int) -> NDArray[Any]:
    """The n words of ``word`` bytes that a segment holds.

    Raises:
        ValueError: the segment is not an encoding of so many words.
    """
    width, low, row = (
        (*stream[:1], 255)[0],
        int.from_bytes(stream[8:16], "little"),
        -(-n // 16) * 16,
    )
    at = HEADER + width // 8 * row
    if width > 8 * word or len(stream) != at + parts_bytes(n, width % 8):
        raise ValueError("width or length")
    top, _ = get_parts_reference(stream, at, width % 8, n)
    values = []
    for i in range(n):
        value = low + (top[i] << width // 8 * 8)
        value += sum(stream[HEADER + row * byte + i] << 8 * byte for byte in range(width // 8))
        values.append((value ^ flip) & (1 << 8 * word) - 1)
    return np.array(values, f"u{word}")
