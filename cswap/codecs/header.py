"""The self-describing stream: header, then payload. See docs/format.md, section "Stream".

A stream may be damaged or hostile. `read_stream` checks everything before use, and allocates
nothing but a copy of the payload.
"""

from __future__ import annotations

import math
import struct
import zlib
from typing import Final

import numpy as np
import torch

from cswap.codecs.layout import has_gaps
from cswap.errors import CorruptEncodingError, UnsupportedError
from cswap.schema.tensor import DTYPES, TensorMeta

MAGIC: Final = b"CSWP"
VERSION: Final = 1

# magic, checksum, version, header bytes, dimensions, bytes of codec name and of dtype name, zero,
# payload bytes
_FIXED: Final = struct.Struct("<4sIHHBBBBQ")
_CHECKED_FROM: Final = 8
"""The checksum covers every byte from here on; the magic in front is compared."""

_ALIGN: Final = 16
MAX_DIMS: Final = 64
"""More than PyTorch can index."""

MAX_NAME_BYTES: Final = 255

_MAX_COUNT: Final = 2**63
"""PyTorch counts elements and bytes with 63 bits."""

GAP_RATIO: Final = 4096
GAP_BYTES: Final = 256 << 20
"""The gaps of a tensor may take GAP_RATIO times the payload, or GAP_BYTES if that is more. They are
restored but not in the payload, so a short stream could otherwise claim any amount of memory."""


def write_stream(name: str, meta: TensorMeta, tensor: torch.Tensor) -> bytes:
    """Header and payload as bytes.

    Args:
        name: of the codec.
        meta: layout of the encoded tensor.
        tensor: [nbytes] uint8, on any device.

    Raises:
        UnsupportedError: the gaps between the tensor's elements are larger than a reader accepts
            (GAP_RATIO), or the codec's name is too long.
    """
    payload = tensor.detach().cpu().contiguous().numpy()
    if not _gaps_allowed(meta, payload.size):
        raise UnsupportedError(
            f"tensor of sizes {meta.sizes}, strides {meta.strides}: its gaps span {meta.nbytes} "
            f"bytes, too many for a stream. Encode tensor.contiguous() instead."
        )
    codec, dtype = name.encode(), meta.dtype.encode()
    n_dims = len(meta.sizes)
    if len(codec) > MAX_NAME_BYTES:
        raise UnsupportedError(
            f"codec={name!r}: its name is too long for a stream, which takes "
            f"{MAX_NAME_BYTES} bytes."
        )
    size = _header_bytes(n_dims, len(codec), len(dtype))
    fixed = (VERSION, size, n_dims, len(codec), len(dtype), 0, payload.size)
    rest = struct.pack(f"<{2 * n_dims}Q", *meta.sizes, *meta.strides) + codec + dtype
    header = bytearray(size)
    header[: _FIXED.size] = _FIXED.pack(MAGIC, 0, *fixed)
    header[_FIXED.size : _FIXED.size + len(rest)] = rest
    checksum = zlib.crc32(payload.data, zlib.crc32(header[_CHECKED_FROM:]))
    struct.pack_into("<I", header, 4, checksum)
    return b"".join((header, payload.data))


def read_stream(data: bytes | bytearray | memoryview) -> tuple[str, TensorMeta, torch.Tensor]:
    """Of the encoding in a stream: its codec's name, its layout, its payload on the CPU.

    Raises:
        CorruptEncodingError: not a stream, or damaged.
    """
    view = memoryview(data).cast("B")
    if view.nbytes < _FIXED.size or bytes(view[:4]) != MAGIC:
        raise CorruptEncodingError(
            f"stream of {view.nbytes} bytes starting with {bytes(view[:4])!r}: "
            "not one of cswap's, or truncated."
        )
    fixed = _FIXED.unpack_from(view)
    _, checksum, version, size, n_dims, n_codec, n_dtype, zero, n_payload = fixed
    if zlib.crc32(view[_CHECKED_FROM:]) != checksum:
        raise CorruptEncodingError(
            f"stream of {view.nbytes} bytes: checksum differs; it is truncated or damaged."
        )
    if version != VERSION:
        raise CorruptEncodingError(
            f"stream of version {version}: this cswap reads version {VERSION}. Update cswap."
        )
    expected = _header_bytes(n_dims, n_codec, n_dtype)
    if zero or n_dims > MAX_DIMS or size != expected or size + n_payload != view.nbytes:
        raise CorruptEncodingError(
            f"stream of {view.nbytes} bytes: header of {size} bytes and payload of {n_payload} "
            "do not add up."
        )
    meta, name = _parse(view[_FIXED.size : size], n_dims, n_codec, n_dtype)
    if not _gaps_allowed(meta, n_payload):
        raise CorruptEncodingError(
            f"stream of {view.nbytes} bytes claims gaps of {meta.nbytes} bytes in memory."
        )
    payload = torch.empty(n_payload, dtype=torch.uint8)
    payload.numpy()[:] = np.frombuffer(view[size:], np.uint8)
    return name, meta, payload


def _header_bytes(n_dims: int, n_codec: int, n_dtype: int) -> int:
    size = _FIXED.size + 16 * n_dims + n_codec + n_dtype
    return -(-size // _ALIGN) * _ALIGN


def _parse(rest: memoryview, n_dims: int, n_codec: int, n_dtype: int) -> tuple[TensorMeta, str]:
    # (layout, codec's name), from the part of the header after the fixed fields.
    counts = struct.unpack_from(f"<{2 * n_dims}Q", rest)
    names = bytes(rest[16 * n_dims :])
    codec, dtype = names[:n_codec], names[n_codec : n_codec + n_dtype]
    known = dtype.decode("latin-1")
    if known not in DTYPES or any(names[n_codec + n_dtype :]):
        raise CorruptEncodingError(f"stream of dtype {known!r}: unknown, or not padded with zeros.")
    meta = TensorMeta(known, counts[:n_dims], counts[n_dims:])
    numel = math.prod(max(n, 1) for n in meta.sizes)  # PyTorch multiplies these, too
    largest = max((numel, meta.nbytes, *meta.strides))
    if largest >= _MAX_COUNT:
        raise CorruptEncodingError(
            f"stream of sizes {meta.sizes}, strides {meta.strides}: beyond any memory."
        )
    try:
        return meta, codec.decode()
    except UnicodeDecodeError as error:
        raise CorruptEncodingError(f"stream of codec {codec!r}: no such codec.") from error


def _gaps_allowed(meta: TensorMeta, tensorbytes: int) -> bool:
    return meta.nbytes <= max(GAP_BYTES, GAP_RATIO * tensorbytes) or not has_gaps(meta)
