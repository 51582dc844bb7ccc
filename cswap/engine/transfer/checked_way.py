"""A codec's way by address whose payloads are compared on the way back.

A checksum follows each payload, so an encoding brings it along and nobody else has to know of it.
"""

from __future__ import annotations

import ctypes
import zlib
from typing import TYPE_CHECKING, Final

from cswap.engine.transfer.resources import DAMAGED
from cswap.errors import CorruptEncodingError

if TYPE_CHECKING:
    from cswap.codecs.base import ByAddress

CHECKSUM_BYTES: Final = 4
"""Of a CRC-32, little-endian."""

READ_ONLY: Final = 0x100
"""PyBUF_READ of Python's C interface."""

_view = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int)(
    ("PyMemoryView_FromMemory", ctypes.pythonapi)
)


class CheckedByAddress:
    """See `ByAddress`.

    Attributes:
        bound: bytes that `encode` may write.
    """

    __slots__ = ("_codec_name", "_way", "bound")

    def __init__(self, codec_name: str, way: ByAddress) -> None:
        """Args: codec_name: for errors; way: of the codec."""
        self._codec_name, self._way = codec_name, way
        self.bound = way.bound + CHECKSUM_BYTES

    def encode(self, source: int, target: int) -> int:
        """See `ByAddress.encode`."""
        nbytes = self._way.encode(source, target)
        if not 0 <= nbytes <= self._way.bound:
            return -1  # which the caller refuses
        ctypes.memmove(target + nbytes, _checksum(target, nbytes), CHECKSUM_BYTES)
        return nbytes + CHECKSUM_BYTES

    def decode(self, payload: int, nbytes: int, target: int) -> None:
        """See `ByAddress.decode`.

        Raises:
            CorruptEncodingError: also if a bit has changed.
        """
        nbytes -= CHECKSUM_BYTES
        if nbytes < 0 or ctypes.string_at(payload + nbytes, CHECKSUM_BYTES) != _checksum(
            payload, nbytes
        ):
            raise CorruptEncodingError(DAMAGED.format(self._codec_name, nbytes))
        self._way.decode(payload, nbytes, target)


def _checksum(address: int, nbytes: int) -> bytes:
    return zlib.crc32(_view(address, nbytes, READ_ONLY)).to_bytes(CHECKSUM_BYTES, "little")
