"""``zvc``, zero-value compression: a bit per word, then the words that are not zero.

See docs/format/zvc.md. Zero means all bits zero: -0.0 survives, and so does every NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.simd import compress, expand, nonzero_mask
from cswap_kernels.words import (
    AHEAD,
    FAR,
    compress_loop,
    expand_loop,
    load_mask,
    nonzero_loop,
    popcount,
    prefetch,
    store_mask,
    word_bytes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray


@njit(nogil=True, cache=True)
def mask_bytes(n):
    """Bytes of the bitmask of n words, padded to 16."""
    return 16 * ((n + 127) // 128)


@njit(nogil=True, cache=True)
def write_mask(words, dst):
    """Write the bitmask of words [n] to the start of dst; return the number of nonzero words."""
    count = 0
    full = words.size & ~63
    ahead = FAR // word_bytes(words)
    store_mask(dst, mask_bytes(words.size) - 8, np.uint64(0))
    for i in range(0, full, 64):
        prefetch(words, words, i + ahead)
        mask = nonzero_mask(words, i)
        store_mask(dst, i >> 3, mask)
        count += popcount(mask)
    if full < words.size:
        mask = nonzero_loop(words, full, words.size - full)
        store_mask(dst, full >> 3, mask)
        count += popcount(mask)
    return count


@njit(nogil=True, cache=True)
def read_mask(src, n):
    """Number of survivors in the bitmask of n words at the start of src; -1 if it is not valid."""
    nbytes = mask_bytes(n)
    if src.size < nbytes:
        return -1
    count = 0
    for at in range(0, nbytes, 8):
        count += popcount(load_mask(src, at))
    padded = np.uint64(0)
    for i in range(n & ~63, 8 * nbytes, 64):
        mask = load_mask(src, i >> 3)
        padded |= mask >> np.uint64(n - i) if i < n else mask
    return count if padded == 0 else -1


@njit(nogil=True, cache=True)
def pack(words, masks, dst, at):
    """Pack the words that the bitmask selects into dst from byte ``at`` on; return the end."""
    full = words.size & ~63
    for i in range(0, full, 64):
        prefetch(words, words, i + words.size)  # the next tile, while this one is in the cache
        at = compress(words, i, load_mask(masks, i >> 3), dst, at)
    if full < words.size:
        mask = load_mask(masks, full >> 3)
        at = compress_loop(words, full, words.size - full, mask, dst, at)
    return at


@njit(nogil=True, cache=True)
def unpack(masks, src, at, words):
    """Inverse of `pack`: every word is written."""
    full = words.size & ~63
    for i in range(0, full, 64):
        prefetch(words, src, at + AHEAD)
        at = expand(src, at, load_mask(masks, i >> 3), words, i)
    if full < words.size:
        mask = load_mask(masks, full >> 3)
        expand_loop(src, at, mask, words, full, words.size - full)


@njit(nogil=True, cache=True)
def zvc_encode_cpu(words, dst, args, first):
    """An ``encode_tile``, see tiles.py."""
    count = write_mask(words, dst)
    if count == 0:
        return 0
    start = mask_bytes(words.size)
    if start + count * word_bytes(words) >= words.size * word_bytes(words):
        return -1
    return pack(words, dst, dst, start)


@njit(nogil=True, cache=True)
def zvc_decode_cpu(src, words, args, first):
    """A ``decode_tile``, see tiles.py."""
    if src.size == 0:
        words[:] = 0
        return 0
    count = read_mask(src, words.size)
    start = mask_bytes(words.size)
    if count <= 0 or src.size != start + count * word_bytes(words):
        return -1
    unpack(src, src, start, words)
    return 0


def zvc_encode_reference(words: NDArray[np.unsignedinteger]) -> bytes | None:
    """The segment of a tile by the text of docs/format/zvc.md; None for a raw tile.

    >>> zvc_encode_reference(np.array([0, 7, 0, 0, 0, 0, 0, 0, 0, 9] + 30 * [0], np.uint32)).hex()
    '020200000000000000000000000000000700000009000000'
    """
    survivors = words[words != 0]
    if survivors.size == 0:
        return b""
    mask = np.packbits(words != 0, bitorder="little").tobytes()
    segment = mask + bytes(-len(mask) % 16) + survivors.tobytes()
    return segment if len(segment) < words.nbytes else None


def zvc_decode_reference(segment: bytes, like: NDArray[np.unsignedinteger]) -> None:
    """Decode a segment into the words of ``like``.

    Raises:
        ValueError: the segment is not an encoding of so many words.
    """
    like[:] = 0
    if not segment:
        return
    start = -(-like.size // 128) * 16
    mask = np.unpackbits(np.frombuffer(segment[:start], np.uint8), bitorder="little")
    survivors = np.frombuffer(segment[start:], like.dtype)
    if len(segment) < start or mask[like.size :].any() or not mask.any():
        raise ValueError("bitmask")
    if mask.sum() != survivors.size:
        raise ValueError("survivors")
    like[mask[: like.size] == 1] = survivors
