"""The tile container: directory, segments, raw escape. See docs/format.md, "Tile container".

A format contributes two *tile functions*; everything around them (splitting into tiles, storing a
tile raw when its encoding would not shrink, bounds checks on the way back) is here, once.

Tile functions are compiled per word type and handed to the loops as addresses, see tile_calls.py.

    encode_tile(words [n] u8|u16|u32|u64, dst u8, args [k] u64, first i64) -> i64
        Encodes one tile into the start of dst; returns its bytes, or -1 for "store it raw".
        May write up to (raw bytes of the tile + SLACK) bytes of dst, whatever it returns.
    decode_tile(src [nbytes] u8, words [n], args [k] u64, first i64) -> i64
        The inverse. Must write every word; must not read outside src; returns 0, or -1 when src
        is not an encoding of n words. src may be hostile.

args holds the format's parameters; first is the index of the tile's first word in the tensor.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Final

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.queue import take, wait_and_add
from cswap_kernels.tile_calls import array_at, call_decoder, call_encoder
from cswap_kernels.words import copy_bytes

TILE_WORDS: Final = {1: 8192, 2: 8192, 4: 4096, 8: 2048}
"""Words per tile by word size in bytes: 8 KiB of bytes, else 16 KiB."""

SLACK: Final = 2048
"""Bytes that an encoder may write past the raw size of a tile before it gives up."""

ALIGN: Final = 16
"""Segments start at multiples of this many bytes: the GPU stores 16 bytes at a time."""

ENTRY: Final = 8
"""Bytes of a directory entry: u32 start / ALIGN, u32 bytes with bit 31 set for a raw tile."""

RAW: Final = 0x80000000

CHUNK: Final = 16
"""Tiles that a thread takes at a time: 256 KiB, a quarter of a core's second-level cache."""


def count_tiles(n_words: int, word: int) -> int:
    """Number of tiles of a tensor of ``n_words`` words."""
    return -(-n_words // TILE_WORDS[word])


def directory_bytes(n_tiles: int) -> int:
    """Bytes of the directory, padded to ALIGN."""
    return -(-n_tiles * ENTRY // ALIGN) * ALIGN


def segment_capacity(word: int) -> int:
    """Bytes that a tile's segment can take at most (a raw tile)."""
    return TILE_WORDS[word] * word


@lru_cache(maxsize=4096)
def container_bound(n_words: int, word: int) -> int:
    """Largest payload, in bytes: every tile raw."""
    n_tiles = count_tiles(n_words, word)
    return directory_bytes(n_tiles) + n_tiles * (ALIGN - 1) + n_words * word


@njit(nogil=True, cache=True)
def encode_range(encoder, words, out, directory, args, first_tile, last_tile, tile_words, base):
    """Encode tiles [first_tile, last_tile) into out, densely from byte ``base`` on.

    encoder is the address of a compiled encode_tile.
    Writes their entries of the directory [n_tiles, 2] u32; returns the byte after the last
    segment. out must have room for all of them raw, plus SLACK bytes.
    """
    itemsize = words.itemsize
    cursor = np.int64(base)
    for tile in range(first_tile, last_tile):
        first = tile * tile_words
        x = words[first : min(first + tile_words, words.size)]  # [n]
        raw_bytes = x.size * itemsize
        nbytes = call_encoder(encoder, x, out[cursor:], args, first)
        if nbytes < 0 or nbytes >= raw_bytes:
            nbytes = raw_bytes
            copy_bytes(out[cursor:], x)
            directory[2 * tile + 1] = np.uint32(raw_bytes | 0x80000000)
        else:
            directory[2 * tile + 1] = np.uint32(nbytes)
        directory[2 * tile] = np.uint32(cursor >> 4)
        after = cursor + ((nbytes + 15) & ~np.int64(15))
        out[cursor + nbytes : after] = 0  # no stale bytes: the same tensor, the same stream
        cursor = after
    return cursor


@njit(nogil=True, cache=True)
def encode_at(encoder, like, source, n_words, target, capacity, args, tile_words):
    """Encode the n_words words at address ``source`` to a whole payload at address ``target``.

    like is a word; capacity the bytes at target, at least `container_bound` and SLACK. Returns the
    payload's bytes.
    """
    words = array_at(like, source, n_words)
    out = array_at(np.uint8(0), target, capacity)
    n_tiles = (n_words + tile_words - 1) // tile_words
    start = (8 * n_tiles + 15) & ~np.int64(15)
    out[8 * n_tiles : start] = 0  # defined padding: equal inputs give equal bytes
    directory = out[: 8 * n_tiles].view(np.uint32)
    return encode_range(encoder, words, out, directory, args, 0, n_tiles, tile_words, start)


@njit(nogil=True, cache=True)
def encode_chunks(encoder, words, out, directory, args, tile_words, queue, scratch):
    """Encode chunks of tiles, densely from the queue's value on, until none is left.

    To be called by any number of threads with the same queue, each with a scratch of its own:
    CHUNK tiles raw, plus SLACK bytes. A chunk is encoded to it, which stays in the thread's cache,
    and copied when the sizes of all chunks before it are known.
    """
    n_tiles = (words.size + tile_words - 1) // tile_words
    while True:
        chunk = take(queue)
        first_tile = chunk * CHUNK
        if first_tile >= n_tiles:
            return
        last_tile = min(first_tile + CHUNK, n_tiles)
        nbytes = encode_range(
            encoder, words, scratch, directory, args, first_tile, last_tile, tile_words, 0
        )
        start = wait_and_add(queue, chunk, nbytes)
        for tile in range(first_tile, last_tile):
            directory[2 * tile] += np.uint32(start >> 4)
        copy_bytes(out[start:], scratch[:nbytes])


@njit(nogil=True, cache=True)
def decode_range(decoder, payload, words, args, first_tile, last_tile, tile_words):
    """Decode tiles [first_tile, last_tile) into words; return -1, or the first corrupt tile.

    decoder is the address of a compiled decode_tile.
    """
    n_tiles = (words.size + tile_words - 1) // tile_words
    directory = payload[: 8 * n_tiles].view(np.uint32)  # [n_tiles, 2] u32
    lowest = (8 * n_tiles + 15) & ~np.int64(15)
    itemsize = words.itemsize
    for tile in range(first_tile, last_tile):
        first = tile * tile_words
        x = words[first : min(first + tile_words, words.size)]  # [n]
        start = np.int64(directory[2 * tile]) << 4
        nbytes = np.int64(directory[2 * tile + 1])
        raw = nbytes & 0x80000000 != 0
        nbytes &= 0x7FFFFFFF
        if start < lowest or start + nbytes > payload.size:
            return tile
        segment = payload[start : start + nbytes]
        if raw:
            if nbytes != x.size * itemsize:
                return tile
            copy_bytes(x, segment)
        elif call_decoder(decoder, segment, x, args, first) != 0:
            return tile
    return -1


@njit(nogil=True, cache=True)
def decode_at(decoder, like, source, nbytes, target, n_words, args, tile_words):
    """Decode the payload of nbytes bytes at address ``source`` to n_words words at ``target``.

    The payload has a whole directory and begins at a multiple of ALIGN. Returns -1, or the first
    corrupt tile.
    """
    payload = array_at(np.uint8(0), source, nbytes)
    words = array_at(like, target, n_words)
    n_tiles = (n_words + tile_words - 1) // tile_words
    return decode_range(decoder, payload, words, args, 0, n_tiles, tile_words)
