"""`Trust`: whether nvCOMP works for a codec and a dtype, found out before tensors depend on it.

When a decode fails, the tensor has gone. So each codec shows once per dtype and process that bytes
come back. Where they do not, or where nvCOMP fails later, the codec takes the dtype no more:
``codec="auto"`` considers others, and the engine moves tensors raw.
"""

from __future__ import annotations

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
    """Of one codec.

    Attributes:
        failed: dtypes that it does not take any more, and what nvCOMP raised.
    """

    def __init__(self, codec: Codec) -> None:
        """Args: codec: it."""
        self._codec = codec
        self._proven: set[torch.dtype] = set()
        self.failed: dict[torch.dtype, str] = {}

    def prove(self, dtype: torch.dtype, device: torch.device) -> None:
        """Encode and decode some bytes, the first time for this dtype. Waits for the device then.

        Raises:
            UnsupportedError: nvCOMP has failed on this dtype.
            MemoryError, torch.OutOfMemoryError: no memory; the next call tries again.
        """
        if dtype not in self._proven:
            self._proven.add(dtype)  # what follows encodes
            try:
                self._round_trip(dtype, device)
            except Exception as error:
                self._proven.discard(dtype)
                if isinstance(error, (MemoryError, torch.OutOfMemoryError)):
                    raise
                self.failed[dtype] = str(error)
        why = self.failed.get(dtype)
        if why is not None:
            name = self._codec.name
            raise UnsupportedError(f"codec {name!r}: nvCOMP has failed on {dtype} ({why}).")

    def lose(self, dtype: torch.dtype, error: Exception) -> None:
        """Take the dtype no more, because nvCOMP raised this error after the proof."""
        if dtype not in self.failed:
            self.failed[dtype] = str(error)
            log.warning("codec %r takes no %s any more: %s", self._codec.name, dtype, error)

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
