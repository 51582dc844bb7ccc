"""``rle``, run lengths: the starts of runs of equal words, and the value of each run.

See docs/format/rle.md. A bit marks the first word of a run. The bits are stored in masks of 64, and
only masks with a set bit are stored. A long run needs no masks inside. Words are equal if their
bits are equal.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.simd import change_mask, compress, spread
from cswap_kernels.words import (
    AHEAD,
    FAR,
    change_loop,
    compress_loop,
    get,
    load,
    load_mask,
    popcount,
    prefetch,
    spread_loop,
    store_mask,
    word_bytes,
)

if TYPE_CHECKING:
    from numpy.typing import NDArray

MASKS_AT: Final = 16
"""Byte behind the two u64 that say which groups have a mask: a tile has up to 128 groups."""


@njit(nogil=True, cache=True)
def _values_at(n_masks):
    return (MASKS_AT + 8 * n_masks + 15) & ~15


@njit(nogil=True, cache=True)
def _mark(dst, group, mask, n_masks):
    # Store a group's mask if it marks a run; return the number of stored masks.
    store_mask(dst, MASKS_AT + 8 * n_masks, mask)
    present = np.uint64(mask != 0) << np.uint64(group & 63)
    at = group >> 6 << 3
    store_mask(dst, at, load_mask(dst, at) | present)
    return n_masks + (mask != 0)


@njit(nogil=True, cache=True)
def _write_masks(words, dst):
    # Write all bytes in front of the values; return (masks, runs).
    store_mask(dst, 0, np.uint64(0))
    store_mask(dst, 8, np.uint64(0))
    mask = change_loop(words, 0, min(words.size, 64))
    n_masks = _mark(dst, 0, mask, 0)
    n_runs = popcount(mask)
    full = words.size & ~63
    ahead = FAR // word_bytes(words)
    for i in range(64, full, 64):
        prefetch(words, words, i + ahead)
        mask = change_mask(words, i)
        n_runs += popcount(mask)
        n_masks = _mark(dst, i >> 6, mask, n_masks)
    if full > 0 and full < words.size:
        mask = change_loop(words, full, words.size - full)
        n_runs += popcount(mask)
        n_masks = _mark(dst, full >> 6, mask, n_masks)
    store_mask(dst, MASKS_AT + 8 * n_masks, np.uint64(0))
    return n_masks, n_runs


@njit(nogil=True, cache=True)
def _is_present(src, group):
    return (load_mask(src, group >> 6 << 3) >> np.uint64(group & 63)) & np.uint64(1) != 0


@njit(nogil=True, cache=True)
def rle_encode_cpu(words, dst, args, first):
    """An ``encode_tile``, see tiles.py."""
    n_masks, n_runs = _write_masks(words, dst)
    if n_runs == 1 and get(words, 0) == 0:
        return 0
    at = _values_at(n_masks)
    if at + n_runs * word_bytes(words) >= words.size * word_bytes(words):
        return -1
    mask_at = MASKS_AT
    full = words.size & ~63
    for i in range(0, full, 64):
        prefetch(words, words, i + words.size)  # the next tile, while this one is in the cache
        if _is_present(dst, i >> 6):
            at = compress(words, i, load_mask(dst, mask_at), dst, at)
            mask_at += 8
    if full < words.size and _is_present(dst, full >> 6):
        at = compress_loop(words, full, words.size - full, load_mask(dst, mask_at), dst, at)
    return at


@njit(nogil=True, cache=True)
def _count_runs(src, n):
    # Read (masks, runs) from the masks of n words; runs is -1 if the masks are damaged.
    n_masks = popcount(load_mask(src, 0)) + popcount(load_mask(src, 8))
    if src.size < _values_at(n_masks):
        return n_masks, -1
    n_runs = 0
    at = MASKS_AT
    for group in range(128):
        if not _is_present(src, group):
            continue
        mask = load_mask(src, at)
        lanes = n - 64 * group
        if mask == 0 or lanes <= 0 or (lanes < 64 and mask >> np.uint64(lanes) != 0):
            return n_masks, -1
        n_runs += popcount(mask)
        at += 8
    first = load_mask(src, 0) & load_mask(src, MASKS_AT) & np.uint64(1)
    return n_masks, n_runs if first != 0 else -1


@njit(nogil=True, cache=True)
def rle_decode_cpu(src, words, args, first):
    """A ``decode_tile``, see tiles.py."""
    if src.size == 0:
        words[:] = 0
        return 0
    if src.size < MASKS_AT + 8:
        return -1
    n_masks, n_runs = _count_runs(src, words.size)
    at = _values_at(n_masks)
    if n_runs < 0 or src.size != at + n_runs * word_bytes(words):
        return -1
    at -= word_bytes(words)  # position before the first run; bit 0 of the first mask advances it
    mask_at = MASKS_AT
    full = words.size & ~63
    for i in range(0, full, 64):
        if _is_present(src, i >> 6):
            prefetch(words, src, at + AHEAD)
            at = spread(src, at, load_mask(src, mask_at), words, i)
            mask_at += 8
        else:
            words[i : i + 64] = load(words, src, at)
    if full < words.size:
        mask = load_mask(src, mask_at) if _is_present(src, full >> 6) else np.uint64(0)
        spread_loop(src, at, mask, words, full, words.size - full)
    return 0


def rle_encode_reference(words: NDArray[np.unsignedinteger]) -> bytes | None:
    """The segment of a tile by the text of docs/format/rle.md; None for a raw tile.

    >>> rle_encode_reference(np.array([7, 7, 7, 0, 0] + 40 * [9], np.uint32)).hex()
    '0100000000000000000000000000000029000000000000000000000000000000070000000000000009000000'
    """
    starts = np.concatenate(([True], words[1:] != words[:-1]))
    if not words.any():
        return b""
    masks = np.packbits(np.pad(starts, (0, -starts.size % 64)), bitorder="little").view("<u8")
    present = np.packbits(np.pad(masks != 0, (0, 128 - masks.size)), bitorder="little")
    stored = masks[masks != 0].tobytes()
    segment = present.tobytes() + stored + bytes(-len(stored) % 16) + words[starts].tobytes()
    return segment if len(segment) < words.nbytes else None


def rle_decode_reference(segment: bytes, like: NDArray[np.unsignedinteger]) -> None:
    """Decode a segment into the words of ``like``.

    Raises:
        ValueError: the segment is not an encoding of so many words.
    """
    like[:] = 0
    if not segment:
        return
    present = np.unpackbits(np.frombuffer(segment, np.uint8, 16), bitorder="little") == 1
    masks = np.zeros(128, "<u8")
    masks[present] = np.frombuffer(segment, "<u8", present.sum(), 16)
    starts = np.unpackbits(masks.view(np.uint8), bitorder="little")
    values = np.frombuffer(segment[16 + -(-present.sum() // 2) * 16 :], like.dtype)
    if not starts[0] or starts[like.size :].any() or (masks[present] == 0).any():
        raise ValueError("masks")
    if starts.sum() != values.size:
        raise ValueError("values")
    like[:] = values[np.cumsum(starts[: like.size], dtype=np.int64) - 1]
