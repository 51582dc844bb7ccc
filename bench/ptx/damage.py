"""Damaged payloads: single bits, random data, cuts, and wrong entries of the directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from collections.abc import Iterator

Bytes = NDArray[np.uint8]


def damaged(
    payload: Bytes, n: int, word: int, tile: int, rng: np.random.Generator, count: int
) -> Iterator[tuple[Bytes, str]]:
    """(payload, kind of damage) of several kinds, up to ``count`` of each.

    Args:
        payload: a good one.
        n: words that it encodes.
        word: bytes of one.
        tile: words per tile, or 0 for a format without tiles.
        rng: chooses the places.
        count: of each kind.
    """
    n_tiles = -(-n // tile) if tile else 0
    head = 8 * n_tiles if tile else 16
    for bit in rng.permutation(head * 8)[:count]:
        yield _flipped(payload, int(bit)), f"one bit {bit} of the directory or header"
    if payload.size > head + 16:
        yield from _damaged_data(payload, head, rng, count)
    for cut in (1, 16, 17, payload.size // 2):
        if payload.size - cut > 0:
            yield payload[: payload.size - cut].copy(), f"cut by {cut}"
    for _ in range(count if tile else 0):
        yield _wrong_entry(payload, n, word, tile, rng)


def _flipped(payload: Bytes, bit: int) -> Bytes:
    bad = payload.copy()
    bad[bit >> 3] ^= np.uint8(1 << (bit & 7))
    return bad


def _damaged_data(
    payload: Bytes, head: int, rng: np.random.Generator, count: int
) -> Iterator[tuple[Bytes, str]]:
    for end in (payload.size, min(payload.size, head + 200)):
        for bit in rng.integers(head * 8, end * 8, count):
            yield _flipped(payload, int(bit)), f"one bit {bit} of the data"
    start = -(-head // 16) * 16
    for _ in range(max(1, count // 2)):
        bad = payload.copy()
        bad[start:] = rng.integers(0, 256, bad.size - start, dtype=np.uint8)
        yield bad, "all data random"
        at = int(rng.integers(start, payload.size))
        bad = payload.copy()
        bad[at : at + 40] = 255
        yield bad.copy(), f"ones from {at} on"
        bad[start : start + 600] = 0
        yield bad, f"zeros first, ones from {at} on"


def _wrong_entry(
    payload: Bytes, n: int, word: int, tile: int, rng: np.random.Generator
) -> tuple[Bytes, str]:
    n_tiles = -(-n // tile)
    bad = payload.copy()
    entries = bad[: 8 * n_tiles].view(np.uint32).reshape(n_tiles, 2)
    k, how = int(rng.integers(n_tiles)), int(rng.integers(6))
    raw = min(tile, n - k * tile) * word
    if how == 0:
        entries[k, 1] = raw + int(rng.integers(0, 64))
    elif how == 1:
        entries[k, 1] = int(rng.integers(0, raw))
    elif how == 2:
        entries[k, 0] = int(rng.integers(0, 1 << 32))
    elif how == 3:
        entries[k, 1] = 0x7FFFFFFF
    elif how == 4:
        entries[k, 1] ^= 0x80000000
    else:
        entries[k, 0] = int(rng.integers(0, bad.size // 16 + 2))
    return bad, f"one directory entry, tile {k}: {entries[k].tolist()}"
