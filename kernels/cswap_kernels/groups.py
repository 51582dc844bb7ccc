"""Shared by the formats of groups (``int8``, ``fp8``, ``mxfp8``, ``int4``): all but one group.

Consecutive words share a scale. A tile is an *entry* per group, zeros up to a multiple of 16 bytes,
and the codes, one byte per word. See docs/format/lossy.md, "Groups". A format contributes its words
per group, the type of its entries, and three functions on one group, compiled with `inlined`:

    measure(x f32, at, n) -> (top, counts i32, ends)
        Of x[at : at + n]: the bits of max |x|; `counted` of all values; whatever `encode` wants.
    encode(x, at, n, ends, entries, group, codes u8, first, random)
        x[at : at + n], all below 2**126, to entries[group] and codes[first : first + n].
        ``random`` is an array that the format gave to `encode_groups`.
    decode(entries, group, codes, first, x, at, n)
        The inverse. Nothing is known of the entry and the codes.

They loop over unsigned indices, see floats.py. They are called with a constant n for the whole
groups: then LLVM vectorises without a rest. The last group of a tile may be shorter.
"""

from __future__ import annotations

import numpy as np
from numba import literally

from cswap_kernels.floats import LIMIT, OCTAVES, floats_of, narrow_piece, widen_piece
from cswap_kernels.jit import njit
from cswap_kernels.uncounted import inlined, uncounted
from cswap_kernels.words import padded

_COUNT = np.int32(1 << 20)  # beyond any sum of the biased exponents of a group


@inlined
def counted(counts, bits):
    """``counts`` (i32, 0 at first) of values, to which that with these bits (u32) is added."""
    magnitude = np.int32(np.int32(bits) & np.int32(0x7FFFFFFF))
    counts = np.int32(counts + np.int32(magnitude >> np.int32(23)))
    return np.int32(counts + (_COUNT if magnitude != 0 else np.int32(0)))


@inlined
def _merge(a, b):
    # (bits of max |x|, sum of biased exponents, non-zeros) of the values of both.
    return max(a[0], b[0]), a[1] + b[1], a[2] + b[2]


@inlined
def _encode_run(
    measure, encode, size, x, start, entries, codes, random, first_group, last_group, n
):
    # Encode groups of n values; x begins with value ``start``. Returns an argument of `_merge`.
    total = np.int32(0), np.int64(0), np.int64(0)
    for group in range(first_group, last_group):
        first, at = np.uint64(size * group), np.uint64(size * group - start)
        top, counts, ends = measure(x, at, n)
        exponents = np.int64(counts & np.int32(_COUNT - np.int32(1)))
        total = _merge(total, (np.int32(top), exponents, np.int64(counts >> np.int32(20))))
        if total[0] >= LIMIT:
            break
        encode(x, at, n, ends, entries, group, codes, first, random)
    return total


@njit(nogil=True)
def _encode_piece(measure, encode, size, x, start, n, entries, codes, random):
    # Encode x[:n], the values from ``start`` on. Returns an argument of `_merge`.
    x, entries, codes, random = uncounted((x, entries, codes, random))
    k = literally(size)
    group, end, rest = start // k, (start + n) // k, n % k
    whole = _encode_run(measure, encode, k, x, start, entries, codes, random, group, end, k)
    group, end = end, end + (rest > 0)
    short = _encode_run(measure, encode, k, x, start, entries, codes, random, group, end, rest)
    return _merge(whole, short)


@njit(nogil=True)
def _decode_piece(decode, size, entries, codes, x, start, n):
    # Inverse of `_encode_piece`.
    entries, codes, x = uncounted((entries, codes, x))
    k = literally(size)
    end = (start + n) // k
    for group in range(start // k, end):
        decode(entries, group, codes, np.uint64(k * group), x, np.uint64(k * group - start), k)
    if n % k:
        decode(entries, end, codes, np.uint64(k * end), x, np.uint64(k * end - start), n % k)


@inlined
def encode_groups(measure, encode, size, entry, words, dst, kind, random):
    """Encode a tile, see cswap_kernels/tiles.py. Bytes of entries and codes; -1 for a raw tile.

    ``measure`` and ``encode`` are the format's; ``size``, words per group, is a constant that
    divides `floats.PIECE`; ``entry`` the type of an entry, np.uint8 or np.uint32; ``kind`` the
    float format of the words, args[0] of the tile encoder; ``random`` an array for ``encode``.
    """
    n_groups = (words.size + size - 1) // size
    end = n_groups * (np.iinfo(entry).bits // 8)
    entries, start = dst[:end].view(entry), padded(end)
    dst[end:start] = 0
    codes, x = dst[start : start + words.size], floats_of(words)
    total = np.int32(0), np.int64(0), np.int64(0)
    for at in range(0, words.size, max(x.size, 1)):
        n = min(x.size, words.size - at)
        widen_piece(words, at, n, kind, x)
        found = _encode_piece(measure, encode, size, x, at, n, entries, codes, random)
        total = _merge(total, found)
    # See docs/format/lossy.md, "Tiles stored raw".
    top, exponents, n_nonzero = total
    distance = np.int64(top >> 23) * n_nonzero - exponents
    raw = top >= LIMIT or distance > OCTAVES * n_nonzero
    return np.int64(-1) if raw else start + words.size


@inlined
def decode_groups(decode, size, entry, src, code_bytes, words, kind):
    """Decode a tile; 0, or -1 if ``src`` is no encoding of so many words.

    ``code_bytes`` is the bytes of the codes of so many words; the others: see `encode_groups`.
    """
    n_groups = (words.size + size - 1) // size
    end = n_groups * (np.iinfo(entry).bits // 8)
    if src.size != padded(end) + code_bytes:
        return np.int64(-1)
    entries, codes, x = src[:end].view(entry), src[padded(end) :], floats_of(words)
    for at in range(0, words.size, max(x.size, 1)):
        n = min(x.size, words.size - at)
        _decode_piece(decode, size, entries, codes, x, at, n)
        narrow_piece(x, words, at, n, kind)
    return np.int64(0)
