"""Decodes nvCOMP payloads on the host, for algorithms that other packages implement.

docs/format/nvcomp.md describes the layout of nvCOMP's container and the way it was found.
"""

from __future__ import annotations

import importlib
import struct
import zlib
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from cswap.errors import ConfigError, CorruptEncodingError

if TYPE_CHECKING:
    from collections.abc import Callable

    Decoder = Callable[[memoryview, int], bytes]
    """A function of a chunk's stream and number of raw bytes that returns the raw bytes. It returns
    fewer bytes if the stream holds fewer."""

MAGIC: Final = 0x52911327

# magic, major and minor version, algorithm, bytes of all chunks, raw bytes, number of chunks, raw
# bytes of a chunk, offset of the first chunk
_HEADER: Final = struct.Struct("<IBBHQQQQI")
HEADER_BYTES: Final = _HEADER.size

TABLE_ENTRY: Final = 16
"""Bytes per chunk before the first chunk: u64 start, and in a second table u64 length."""


@dataclass(frozen=True, slots=True)
class Header:
    """The first bytes of a container.

    Attributes:
        nbytes: bytes of all chunks and of the padding between them.
        raw_nbytes: raw bytes of all chunks.
        n_chunks: number of chunks.
        chunk_nbytes: raw bytes of each chunk but the last.
        start: offset of the first chunk in the container.
    """

    nbytes: int
    raw_nbytes: int
    n_chunks: int
    chunk_nbytes: int
    start: int


def read_header(head: bytes | memoryview, payload_nbytes: int, raw_nbytes: int) -> Header:
    """Read and check the header of a container.

    Args:
        head: at least the first HEADER_BYTES of the payload.
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
    return Header(nbytes, claimed, n_chunks, chunk_nbytes, start)


def decode_on_host(codec: str, payload: bytes | bytearray | memoryview, nbytes: int) -> bytes:
    """Decode a payload of an ``nvcomp-...`` codec without a GPU and without nvCOMP.

    Args:
        codec: "nvcomp-lz4", "nvcomp-zstd", "nvcomp-snappy" or "nvcomp-deflate".
        payload: the payload, in host memory. A payload from outside must have passed the checksum.
        nbytes: raw bytes of the tensor's flat elements.

    Raises:
        ConfigError: no host decoder exists for the codec, or its package is missing.
        CorruptEncodingError: ``payload`` does not hold ``nbytes`` raw bytes.
    """
    decode = chunk_decoder(codec)
    view = memoryview(payload).cast("B")
    if view.nbytes == nbytes:  # stored raw
        return bytes(view)
    header = read_header(view[:HEADER_BYTES], view.nbytes, nbytes)
    parts = []
    for index, segment in enumerate(_segments(view, header)):
        left = nbytes - index * header.chunk_nbytes
        expected = min(header.chunk_nbytes, left)
        part = decode(segment, expected)
        if len(part) != expected:
            raise CorruptEncodingError(
                f"codec {codec!r}: chunk {index} holds {len(part)} bytes, {expected} expected."
            )
        parts.append(part)
    return b"".join(parts)


def _segments(view: memoryview, header: Header) -> list[memoryview]:
    # The streams of all chunks, in order.
    n = header.n_chunks
    numbers = struct.unpack_from(f"<{2 * n}Q", view, header.start - TABLE_ENTRY * n)
    starts, lengths = numbers[:n], numbers[n:]
    end, found = 0, []
    for index, (start, length) in enumerate(zip(starts, lengths, strict=True)):
        if start < end or start + length > header.nbytes:
            raise CorruptEncodingError(
                f"nvCOMP payload: chunk {index} of {length} bytes begins at {start}; the one "
                f"before ends at {end}, the last at {header.nbytes}."
            )
        end = start + length
        found.append(view[header.start + start : header.start + end])
    return found


def chunk_decoder(codec: str) -> Decoder:
    """The function that decodes one chunk (a RAW stream, in nvCOMP's words).

    Raises:
        ConfigError: no host decoder exists for the codec, or its package is missing.
    """
    make = _DECODERS.get(codec)
    if make is None:
        raise ConfigError(
            f"codec={codec!r}: cannot be decoded on the host. Known: {', '.join(_DECODERS)}."
        )
    return make(codec)


def can_decode_on_host(codec: str) -> bool:
    """Whether a host decoder exists for the codec; its package may be missing."""
    return codec in _DECODERS


def _lz4(codec: str) -> Decoder:
    lz4 = _needed("lz4.block", codec)

    def decode(segment: memoryview, nbytes: int) -> bytes:
        try:
            return lz4.decompress(segment, uncompressed_size=nbytes)  # type: ignore[no-any-return]
        except lz4.LZ4BlockError as error:
            raise CorruptEncodingError(f"codec {codec!r}: {error}") from error

    return decode


def _zstd(codec: str) -> Decoder:
    zstd = _needed("zstandard", codec)
    decompressor = zstd.ZstdDecompressor()

    def decode(segment: memoryview, nbytes: int) -> bytes:
        try:
            # decompress() allocates the size that the frame claims, so check it first.
            claimed = zstd.frame_content_size(segment)
            if claimed not in (-1, nbytes):
                raise CorruptEncodingError(
                    f"codec {codec!r}: frame claims {claimed} bytes, {nbytes} expected."
                )
            return decompressor.decompress(segment, max_output_size=nbytes)  # type: ignore[no-any-return]
        except zstd.ZstdError as error:
            raise CorruptEncodingError(f"codec {codec!r}: {error}") from error

    return decode


def _snappy(codec: str) -> Decoder:
    cramjam = _needed("cramjam", codec)

    def decode(segment: memoryview, nbytes: int) -> bytes:
        claimed = _varint(segment)  # checked, because decompress_raw() allocates this size
        if claimed != nbytes:
            raise CorruptEncodingError(
                f"codec {codec!r}: stream claims {claimed} bytes, {nbytes} expected."
            )
        try:
            return bytes(cramjam.snappy.decompress_raw(bytes(segment)))
        except cramjam.DecompressionError as error:
            raise CorruptEncodingError(f"codec {codec!r}: {error}") from error

    return decode


def _varint(segment: memoryview) -> int:
    # Seven bits per byte, lowest first. The high bit is set if more bytes follow.
    value = 0
    for index, byte in enumerate(segment[:5]):
        value |= (byte & 0x7F) << (7 * index)
        if not byte & 0x80:
            return value
    return -1


def _deflate(codec: str) -> Decoder:
    def decode(segment: memoryview, nbytes: int) -> bytes:
        stream = zlib.decompressobj(-zlib.MAX_WBITS)  # negative: no zlib header around it
        try:
            # One byte more than expected, to detect a longer stream.
            return stream.decompress(segment, nbytes + 1)
        except zlib.error as error:
            raise CorruptEncodingError(f"codec {codec!r}: {error}") from error

    return decode


_DECODERS: Final[dict[str, Callable[[str], Decoder]]] = {
    "nvcomp-lz4": _lz4,
    "nvcomp-zstd": _zstd,
    "nvcomp-snappy": _snappy,
    "nvcomp-deflate": _deflate,
}


def _needed(module: str, codec: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        package = module.partition(".")[0]
        raise ConfigError(
            f"codec={codec!r}: to be decoded on the host it needs the package {package!r} "
            f"({error}). Install it: pip install {package}."
        ) from error
