"""Compiles a codec's kernels before its first run is timed or waited for."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Final

import torch

from cswap.log import log

if TYPE_CHECKING:
    from cswap.codecs.base import Codec

WARM: Final[set[tuple[str, torch.dtype, torch.device]]] = set()
"""Codecs whose kernels this process has compiled or loaded from the disk cache."""

NUMEL: Final = 64
"""Elements of the tensor that is encoded and decoded to warm a codec."""


def warm(codec: Codec, dtype: torch.dtype, device: torch.device) -> float:
    """Compile or load the codec's kernels; returns the seconds, 0.0 if that was done before."""
    key = (codec.name, dtype, device)
    if key in WARM:
        return 0.0
    start = time.perf_counter()
    try:
        codec.decode(codec.encode(torch.zeros(NUMEL, dtype=dtype, device=device)))
    except Exception:
        log.debug("warming %s failed", codec.name, exc_info=True)
    WARM.add(key)
    return time.perf_counter() - start
