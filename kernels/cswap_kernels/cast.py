"""``bf16``, ``fp16``: each word of 4 or 8 bytes as one of 2. See docs/format/cast.md."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from cswap_kernels.floats import (
    BFLOAT16,
    bits_of,
    float_to_bfloat16,
    float_to_half,
    floats_of,
    narrow_piece,
    widen_piece,
)
from cswap_kernels.jit import njit

if TYPE_CHECKING:
    from numpy.typing import NDArray


_M = np.uint32(0x7FFFFFFF)
_HALF_LIMIT = 0x477FF000  # bits of 65520, the smallest value that becomes infinite in float16
_BFLOAT16_LIMIT = 0x7F7F8000  # bits of the smallest value that becomes infinite in bfloat16


@njit(nogil=True, cache=True)
def _encode_piece(x, codes, first, n, target):
    # Cast x[:n] to codes[first:]; return the bits of max |x|.
    top = np.uint32(0)
    if target == BFLOAT16:
        for i in range(np.uint64(n)):
            codes[np.uint64(first) + i] = float_to_bfloat16(x[i])
            top = max(top, np.uint32(bits_of(x[i]) & _M))
    else:
        for i in range(np.uint64(n)):
            codes[np.uint64(first) + i] = float_to_half(x[i])
            top = max(top, np.uint32(bits_of(x[i]) & _M))
    return top


@njit(nogil=True, cache=True)
def cast_encode_cpu(words, dst, args, first):
    """Tile encoder; args[1] names the format to cast to. See cswap_kernels/tiles.py."""
    codes = dst[: 2 * words.size].view(np.uint16)  # [n]
    x = floats_of(words)
    top = np.uint32(0)
    for at in range(0, words.size, max(x.size, 1)):
        n = min(x.size, words.size - at)
        widen_piece(words, at, n, args[0], x)
        top = max(top, _encode_piece(x, codes, at, n, args[1]))
    limit = _BFLOAT16_LIMIT if args[1] == BFLOAT16 else _HALF_LIMIT
    return np.int64(-1) if top >= limit else np.int64(2 * words.size)


@njit(nogil=True, cache=True)
def cast_decode_cpu(src, words, args, first):
    """Tile decoder; see cswap_kernels/tiles.py."""
    if src.size != 2 * words.size:
        return np.int64(-1)
    codes = src.view(np.uint16)  # [n]
    x = floats_of(words)
    for at in range(0, words.size, max(x.size, 1)):
        n = min(x.size, words.size - at)
        widen_piece(codes, at, n, args[1], x)
        narrow_piece(x, words, at, n, args[0])
    return np.int64(0)


def cast_encode_reference(x: NDArray[np.float32], target: int) -> bytes | None:
    """Bytes of a tile x [n], already widened to float32; None if it is stored raw."""
    with np.errstate(over="ignore"):
        codes = x.astype(np.float16).view(np.uint16)
    if target == BFLOAT16:
        bits = x.view(np.uint32).astype(np.uint64)
        codes = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
    infinite = 0x7F80 if target == BFLOAT16 else 0x7C00
    if not np.isfinite(x).all() or (codes & 0x7FFF >= infinite).any():
        return None
    return codes.tobytes()


def cast_decode_reference(data: bytes, target: int) -> NDArray[np.float32]:
    """x_hat [n] of the bytes of a tile."""
    codes = np.frombuffer(data, np.uint16)
    if target == BFLOAT16:
        return (codes.astype(np.uint32) << 16).view(np.float32)
    return codes.view(np.float16).astype(np.float32)
