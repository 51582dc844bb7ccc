"""``csr``, compressed sparse rows: the end of each row of 256 words, columns, values.

See docs/format/csr.md. Zero means all bits zero: -0.0 survives, and so does every NaN.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import numpy as np

from cswap_kernels.jit import njit
from cswap_kernels.simd import OVERSHOOT, compress_lanes
from cswap_kernels.words import get, load, load_mask, padded, put, word_bytes
from cswap_kernels.zvc import pack, write_mask

if TYPE_CHECKING:
    from numpy.typing import NDArray

ROW: Final = 256
"""Words in a row: a column is a byte."""


@njit(nogil=True, cache=True)
def _columns_at(n):
    # The columns begin behind one u16 per row.
    return padded(2 * ((n + ROW - 1) // ROW))


@njit(nogil=True, cache=True)
def _write_columns(masks, n, dst, start):
    # Write row ends to the start of dst, and columns from byte ``start`` on.
    dst[:start] = 0
    at = start
    for i in range(0, n, 64):
        at = compress_lanes(load_mask(masks, i >> 3), i & (ROW - 1), dst, at)
        end = at - start
        row = i // ROW
        put(dst, 2 * row, np.uint8(end & 255))  # the row's last group has the last word
        put(dst, 2 * row + 1, np.uint8(end >> 8))


@njit(nogil=True, cache=True)
def csr_encode_cpu(words, dst, args, first):
    """An ``encode_tile``, see tiles.py."""
    raw_bytes = words.size * word_bytes(words)
    # Scratch memory of this call, behind all bytes that the code below can write.
    masks = dst[raw_bytes + OVERSHOOT :]
    count = write_mask(words, masks)
    if count == 0:
        return 0
    columns_at = _columns_at(words.size)
    values_at = columns_at + padded(count)
    if values_at + count * word_bytes(words) >= raw_bytes:
        return -1
    _write_columns(masks, words.size, dst, columns_at)
    dst[columns_at + count : values_at] = 0
    return pack(words, masks, dst, values_at)


@njit(nogil=True, cache=True)
def _read_row(src, column_at, value_at, count, row):
    # Scatter ``count`` values over a row of zeros; return whether their columns are ascending and
    # within the row.
    before = -1
    for k in range(count):
        column = np.int64(get(src, column_at + k))
        if column <= before or column >= row.size:
            return False
        put(row, column, load(row, src, value_at + k * word_bytes(row)))
        before = column
    return True


@njit(nogil=True, cache=True)
def csr_decode_cpu(src, words, args, first):
    """A ``decode_tile``, see tiles.py."""
    words[:] = 0
    if src.size == 0:
        return 0
    columns_at = _columns_at(words.size)
    if src.size < columns_at:
        return -1
    n_rows = (words.size + ROW - 1) // ROW
    count = np.int64(get(src, 2 * n_rows - 2)) | np.int64(get(src, 2 * n_rows - 1)) << 8
    values_at = columns_at + padded(count)
    if count == 0 or src.size != values_at + count * word_bytes(words):
        return -1
    start = 0
    for row in range(n_rows):
        end = np.int64(get(src, 2 * row)) | np.int64(get(src, 2 * row + 1)) << 8
        if not start <= end <= count:
            return -1
        x = words[ROW * row : ROW * (row + 1)]
        value_at = values_at + start * word_bytes(words)
        if not _read_row(src, columns_at + start, value_at, end - start, x):
            return -1
        start = end
    return 0


def csr_encode_reference(words: NDArray[np.unsignedinteger]) -> bytes | None:
    """The segment of a tile by the text of docs/format/csr.md; None for a raw tile.

    >>> csr_encode_reference(np.array([0, 0, 7, 0] + 7 * [0] + [9], np.uint32)).hex()
    '02000000000000000000000000000000020b00000000000000000000000000000700000009000000'
    """
    places = np.flatnonzero(words)
    if places.size == 0:
        return b""
    rows = -(-words.size // ROW)
    ends = np.cumsum(np.bincount(places // ROW, minlength=rows)).astype("<u2").tobytes()
    columns = (places % ROW).astype(np.uint8).tobytes()
    index = ends + bytes(-len(ends) % 16) + columns + bytes(-len(columns) % 16)
    segment = index + words[places].tobytes()
    return segment if len(segment) < words.nbytes else None


def csr_decode_reference(segment: bytes, like: NDArray[np.unsignedinteger]) -> None:
    """Decode a segment into the words of ``like``.

    Raises:
        ValueError: the segment is not an encoding of so many words.
    """
    like[:] = 0
    if not segment:
        return
    n_rows = -(-like.size // ROW)
    ends = np.frombuffer(segment, "<u2", n_rows).astype(np.int64)
    start = -(-2 * n_rows // 16) * 16
    columns = np.frombuffer(segment, np.uint8, ends[-1], start)
    values = np.frombuffer(segment[start + -(-ends[-1] // 16) * 16 :], like.dtype)
    if values.size != ends[-1] or values.size == 0:
        raise ValueError("values")
    places = ROW * np.repeat(np.arange(n_rows), np.diff(ends, prepend=0)) + columns
    if (np.diff(places) <= 0).any() or (places >= like.size).any():
        raise ValueError("columns")
    like[places] = values
