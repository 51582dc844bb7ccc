"""`NvcompSize`: the size of an encoding, which is known when the stream has run the encode."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cswap.codecs.nvcomp_library import copy_now

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


@dataclass(slots=True)
class NvcompSize:
    """A `LateSize`. It stores the tensor raw if nvCOMP's payload is not shorter or is not allowed.

    Attributes:
        encoded: nvCOMP's array; None after the size is known.
        source: [n] uint8, the raw bytes at the begin of the encode.
        target: uint8, memory that nvCOMP writes.
        out: uint8, memory of the final payload.
        outliers: [] bool on the host: whether the tensor must be stored raw; None: never.
        give_up: gets nvCOMP's error, if it has failed. The tensor is stored raw then.
    """

    encoded: Any
    source: torch.Tensor | None
    target: torch.Tensor
    out: torch.Tensor
    outliers: torch.Tensor | None
    give_up: Callable[[Exception], None]
    nbytes: int = 0

    def value(self) -> int:
        """See `LateSize.value`."""
        if self.source is None:
            return self.nbytes
        source = self.source
        try:
            nbytes = int(self.encoded.buffer_size)
        except Exception as error:
            self.give_up(error)
            nbytes = source.numel()
        raw = nbytes >= source.numel() or (self.outliers is not None and bool(self.outliers))
        if raw:
            nbytes = source.numel()
            copy_now(self.out[:nbytes], source)
        elif self.target is not self.out:
            copy_now(self.out[:nbytes], self.target[:nbytes])
        self.nbytes, self.source, self.encoded = nbytes, None, None
        return nbytes
