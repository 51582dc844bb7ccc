"""`Trust`: whether nvCOMP works for a codec and a dtype, found out before tensors depend on it.

When a decode fails, the tensor has gone. So each codec shows once per dtype and process that bytes
come back. Where they do not, or where nvCOMP fails later, the codec takes the dtype no more:
``codec="auto"`` considers others, and the engine moves tensors raw.
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Final

import torch

from cswap.codecs.base import DEFAULT_KEY, checked_size
from cswap.errors import CorruptEncodingError, UnsupportedError
from cswap.log import log

if TYPE_CHECKING:
    from cswap.codecs.base import Codec

PROOF_BYTES: Final = 1 << 17
"""Raw bytes that are encoded and decoded for it: two of nvCOMP's chunks."""


class Trust:
    """Of one codec. Thread-safe.

    Attributes:
        failed: dtypes that it does not take any more, and nvCOMP's errors.
    """

    def __init__(self, codec: Codec) -> None:
        """Args: codec: it."""
        self._codec = codec
        self._lock = threading.RLock()  # the proof itself encodes
        self._trying: set[torch.dtype] = set()
        self._proven: set[torch.dtype] = set()
        self.failed: dict[torch.dtype, str] = {}

    def prove(self, dtype: torch.dtype, device: torch.device) -> None:
        """Encode and decode some bytes, the first time for this dtype. Waits for the device then.

        Raises:
            UnsupportedError: nvCOMP has failed on this dtype.
            MemoryError, torch.OutOfMemoryError: no memory; the next call tries again.
        """
        if dtype in self._proven:
            return
        with self._lock:
            if dtype in self._trying:
                return
            if dtype not in self.failed:
                self._try(dtype, device)
            why = self.failed.get(dtype)
            if why is not None:
                name = self._codec.name
                raise UnsupportedError(f"codec {name!r}: nvCOMP has failed on {dtype} ({why}).")
            self._proven.add(dtype)

    def lose(self, dtype: torch.dtype, error: Exception) -> None:
        """Take the dtype no more, because nvCOMP raised this error after the proof."""
        with self._lock:
            first = dtype not in self.failed
            self._proven.discard(dtype)
            self.failed[dtype] = str(error)
        if first:
            log.warning("codec %r takes no %s any more: %s", self._codec.name, dtype, error)

    def _try(self, dtype: torch.dtype, device: torch.device) -> None:
        self._trying.add(dtype)
        try:
            self._round_trip(dtype, device)
        except (MemoryError, torch.OutOfMemoryError):
            raise
        except Exception as error:
            self.failed[dtype] = str(error)
        finally:
            self._trying.discard(dtype)

    def _round_trip(self, dtype: torch.dtype, device: torch.device) -> None:
        codec = self._codec
        raw = (torch.arange(PROOF_BYTES, device=device) % 7 == 0).view(torch.uint8)
        x, back = raw.view(dtype), torch.empty_like(raw)
        out = torch.empty(codec.bound(dtype, x.numel()), dtype=torch.uint8, device=device)
        nbytes = checked_size(
            codec, codec.encode_flat(x, out, key=DEFAULT_KEY, stream=None), out.numel()
        )
        codec.decode_flat(out[:nbytes], back.view(dtype), stream=None)
        if codec.lossless and not torch.equal(back, raw):
            raise CorruptEncodingError("what it decodes is not what it encoded")
