"""The head of nvCOMP's container, which nvCOMP itself does not check (docs/format/nvcomp.md)."""

from __future__ import annotations

import struct
from typing import Final

from cswap.codecs.nvcomp_library import CHUNK_BYTES
from cswap.errors import CorruptEncodingError

MAGIC: Final = 0x52911327

# magic, major and minor version, algorithm, bytes of all chunks, raw bytes, number of chunks, raw
# bytes of a chunk, offset of the first chunk
_HEADER: Final = struct.Struct("<IBBHQQQQI")
HEADER_BYTES: Final = _HEADER.size

TABLE_ENTRY: Final = 16
"""Bytes per chunk before the first chunk: u64 start, and in a second table u64 length."""


def check_header(head: bytes, payload_nbytes: int, raw_nbytes: int) -> None:
    """Check the header of a container.

    Args:
        head: the first HEADER_BYTES of the payload, or all of a shorter one.
        payload_nbytes: length of the whole payload.
        raw_nbytes: expected number of raw bytes.

    Raises:
        CorruptEncodingError: the payload is not a container, or its sizes are wrong.
    """
    if len(head) < HEADER_BYTES:
        raise CorruptEncodingError(
            f"nvCOMP payload of {payload_nbytes} bytes: its header alone has {HEADER_BYTES}."
        )
    magic, _, _, _, nbytes, claimed, n_chunks, chunk_nbytes, start = _HEADER.unpack_from(head)
    if magic != MAGIC:
        raise CorruptEncodingError(
            f"nvCOMP payload begins with {magic:#010x}, not with nvCOMP 6's {MAGIC:#010x}."
        )
    if claimed != raw_nbytes:
        raise CorruptEncodingError(
            f"nvCOMP payload claims {claimed} raw bytes, {raw_nbytes} expected."
        )
    fits = start >= HEADER_BYTES + TABLE_ENTRY * n_chunks and start + nbytes <= payload_nbytes
    if not fits or chunk_nbytes == 0 or n_chunks != -(-raw_nbytes // chunk_nbytes):
        raise CorruptEncodingError(
            f"nvCOMP payload of {payload_nbytes} bytes: {n_chunks} chunks of {chunk_nbytes} raw "
            f"bytes, {nbytes} bytes from byte {start} on, do not add up."
        )
    if chunk_nbytes != CHUNK_BYTES:
        raise CorruptEncodingError(
            f"nvCOMP payload in chunks of {chunk_nbytes} bytes, {CHUNK_BYTES} expected."
        )
