"""Pinned host memory: by CuPy where it is installed, else by torch.

torch's host allocator rounds a block up to a power of two (a buffer of 9 MiB pins 16), CuPy's to
512 bytes.
"""

from __future__ import annotations

from functools import cache, lru_cache
from typing import TYPE_CHECKING, Any

import torch

from cswap.log import log
from cswap.pool import size_class

if TYPE_CHECKING:
    from collections.abc import Callable


@cache
def _cupy_allocator() -> Callable[[int], Any] | None:
    # CuPy's; None if it is not installed, or finds no CUDA.
    try:
        import cupy

        cupy.cuda.runtime.getDeviceCount()
    except Exception as error:  # whatever is wrong with it, torch serves
        log.debug("pinned memory by torch, not by CuPy: %s", error)
        return None
    allocate: Callable[[int], Any] = cupy.cuda.alloc_pinned_memory
    return allocate


def pinned(nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 of pinned host memory.

    Raises:
        RuntimeError: no more memory can be pinned.
    """
    allocate = _cupy_allocator()
    if allocate is None:
        return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
    try:
        memory = allocate(nbytes)
    except Exception as error:  # CuPy has an exception of its own for each of CUDA's
        raise RuntimeError(f"CuPy: {error}") from None
    return torch.frombuffer(memory, dtype=torch.uint8, count=nbytes)


@lru_cache(maxsize=4096)
def pinned_size(nbytes: int) -> int:
    """Bytes of the buffer to make for ``nbytes``, so that no memory is pinned beside it.

    >>> pinned_size(9 << 20) in (9 << 20, 16 << 20)
    True
    """
    if _cupy_allocator() is not None:
        return size_class(nbytes)
    return max(size_class(1), 1 << max(nbytes - 1, 1).bit_length())
