"""``zvc+X``: a bit per word, then the nonzero words in another format X.

See docs/format/compose.md. X's tile functions are called by their addresses, which come in ``args``
before X's own arguments. So these functions are compiled once and serve every X.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.simd import OVERSHOOT
from cswap_kernels.tile_calls import call_decoder, call_encoder
from cswap_kernels.tiles import SLACK
from cswap_kernels.words import copy_bytes, put, word_bytes
from cswap_kernels.zvc import mask_bytes, pack, read_mask, unpack, write_mask

if TYPE_CHECKING:
    from collections.abc import Callable

    from numpy.typing import NDArray

ADDRESSES: Final = 2
"""Words of ``args`` before X's: addresses of its encode_tile and decode_tile."""

MASK: Final = 1
"""Bit of the flags: the segment starts with a bitmask; else no word of the tile is zero."""

VERBATIM: Final = 2
"""Bit of the flags: the nonzero words are stored verbatim, because X did not shrink them."""


@njit(nogil=True, cache=True)
def _encode_survivors(survivors, dst, start, limit, args, first):
    # Write X's encoding of the survivors, or the survivors verbatim, to byte ``start`` of dst;
    # return (bytes, flags). X may write up to SLACK bytes more than its words have; dst need not
    # have space for them.
    raw_bytes = survivors.size * word_bytes(survivors)
    own_memory = start + raw_bytes > limit
    target = np.empty(raw_bytes + SLACK, np.uint8) if own_memory else dst[start:]
    nbytes = call_encoder(args[0], survivors, target, args[ADDRESSES:], first)
    if nbytes < 0 or nbytes >= raw_bytes:
        if own_memory:
            return raw_bytes, VERBATIM  # does not fit into a tile: the tile is stored raw
        copy_bytes(target, survivors)
        return raw_bytes, VERBATIM
    if own_memory and start + nbytes < limit:
        copy_bytes(dst[start:], target[:nbytes])
    return nbytes, 0


@njit(nogil=True, cache=True)
def zvc_plus_encode_cpu(words, dst, args, first):
    """An ``encode_tile``, see tiles.py; ``args`` begins with two addresses."""
    raw_bytes = words.size * word_bytes(words)
    count = write_mask(words, dst)
    if count == 0:
        return 0
    if count == words.size:
        nbytes = call_encoder(args[0], words, dst, args[ADDRESSES:], first)
        if nbytes < 0 or nbytes + 1 >= raw_bytes:
            return -1
        put(dst, nbytes, np.uint8(0))
        return nbytes + 1
    start = mask_bytes(words.size)
    memory = np.empty(count + OVERSHOOT // word_bytes(words), words.dtype)
    pack(words, dst, memory.view(np.uint8), 0)
    nbytes, flags = _encode_survivors(memory[:count], dst, start, raw_bytes, args, first)
    end = start + nbytes
    if end + 1 >= raw_bytes:
        return -1
    put(dst, end, np.uint8(MASK | flags))
    return end + 1


@njit(nogil=True, cache=True)
def zvc_plus_decode_cpu(src, words, args, first):
    """A ``decode_tile``, see tiles.py; ``args`` begins with two addresses."""
    if src.size == 0:
        words[:] = 0
        return 0
    flags = src[src.size - 1]
    body = src[: src.size - 1]
    if flags == 0:
        return call_decoder(args[1], body, words, args[ADDRESSES:], first)
    if flags != MASK and flags != MASK | VERBATIM:
        return -1
    count = read_mask(body, words.size)
    if count <= 0 or count == words.size:
        return -1
    encoded = body[mask_bytes(words.size) :]
    if flags == MASK | VERBATIM:
        if encoded.size != count * word_bytes(words):
            return -1
        unpack(body, encoded, 0, words)
        return 0
    survivors = np.empty(count, words.dtype)
    if call_decoder(args[1], encoded, survivors, args[ADDRESSES:], first) != 0:
        return -1
    unpack(body, survivors.view(np.uint8), 0, words)
    return 0


def zvc_plus_encode_reference(
    words: NDArray[np.unsignedinteger],
    encode: Callable[[NDArray[np.unsignedinteger]], bytes | None],
) -> bytes | None:
    """The segment of a tile, or None for a raw tile; ``encode`` does the same for X.

    >>> zvc_plus_encode_reference(np.array([0, 7, 0, 9] * 9, np.uint32), lambda x: b"X").hex()
    'aaaaaaaa0a00000000000000000000005801'
    """
    survivors = words[words != 0]
    if survivors.size == 0:
        return b""
    mask = np.packbits(words != 0, bitorder="little").tobytes()
    mask = mask + bytes(-len(mask) % 16) if survivors.size < words.size else b""
    inner = encode(survivors)
    if inner is None:
        segment = mask + survivors.tobytes() + bytes([MASK | VERBATIM])
    else:
        segment = mask + inner + bytes([MASK if mask else 0])
    return segment if len(segment) < words.nbytes else None


def zvc_plus_decode_reference(
    segment: bytes,
    like: NDArray[np.unsignedinteger],
    decode: Callable[[bytes, NDArray[np.unsignedinteger]], None],
) -> None:
    """Decode a segment into the words of ``like``; ``decode`` does the same for X.

    Raises:
        ValueError: the segment is not an encoding of so many words.
    """
    like[:] = 0
    flags = segment[-1] if segment else MASK
    if flags == 0:
        decode(segment[:-1], like)
    if not segment or flags == 0:
        return
    start = -(-like.size // 128) * 16
    mask = np.unpackbits(np.frombuffer(segment[:start], np.uint8), bitorder="little")
    if flags not in (MASK, MASK | VERBATIM) or len(segment) <= start or mask[like.size :].any():
        raise ValueError("flags or bitmask")
    survivors = np.empty(int(mask.sum()), like.dtype)
    if not 0 < survivors.size < like.size:
        raise ValueError("survivors")
    if not flags & VERBATIM:
        decode(segment[start:-1], survivors)
    elif len(segment) - 1 - start != survivors.nbytes:
        raise ValueError("length")
    else:
        survivors = np.frombuffer(segment[start:-1], like.dtype)
    like[mask[: like.size] == 1] = survivors
