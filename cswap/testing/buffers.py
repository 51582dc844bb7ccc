"""Memory that shows which bytes were written, and tools to compare bits."""

from __future__ import annotations

from typing import Final

import numpy as np
import torch

_GUARD_BYTES: Final = 64
_GUARD: Final = 0xC3


class Guarded:
    """Bytes of a chosen content with guard bytes on both sides, aligned as codecs ask for.

    >>> g = Guarded(4, 0xA5)
    >>> g.inside.tolist(), g.intact
    ([165, 165, 165, 165], True)
    """

    def __init__(self, nbytes: int, fill: int) -> None:
        # Filled by numpy, because PyTorch would wake its threads for every small buffer.
        self._all = np.full(nbytes + 2 * _GUARD_BYTES, _GUARD, np.uint8)
        self._all[_GUARD_BYTES : _GUARD_BYTES + nbytes] = fill
        self.inside = torch.from_numpy(self._all)[_GUARD_BYTES : _GUARD_BYTES + nbytes]

    @property
    def intact(self) -> bool:
        """Whether the guard bytes around ``inside`` are unchanged."""
        around = (self._all[:_GUARD_BYTES], self._all[-_GUARD_BYTES:])
        return all(bool((part == _GUARD).all()) for part in around)


def bits(x: torch.Tensor) -> torch.Tensor:
    """[numel * itemsize] uint8: the bits of every element, in the order of its indices."""
    same = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
    # As integers of the same size, which can be copied in any layout; not every dtype can.
    whole = x.view(same.get(x.itemsize, x.dtype)).contiguous()
    # as_strided, because a tensor of one element is contiguous with any strides, but view()
    # accepts only some of them.
    return whole.as_strided((x.numel(),), (1,), whole.storage_offset()).view(torch.uint8)


def memory_of(x: torch.Tensor) -> torch.Tensor:
    """A copy of all bytes of the tensor's storage."""
    whole = torch.empty(0, dtype=torch.uint8)
    whole.set_(x.untyped_storage())
    return whole.clone()


def moved(x: torch.Tensor, device: torch.device | str) -> torch.Tensor:
    """The tensor on a device, with the strides that it has: ``x.to`` copies views densely."""
    whole = torch.empty(0, dtype=x.dtype, device=x.device).set_(x.untyped_storage()).to(device)
    return whole.as_strided(x.shape, x.stride(), x.storage_offset())


def fail_unless(holds: bool, message: str) -> None:
    """Check a condition, also under ``python -O``.

    Raises:
        AssertionError: the condition does not hold.
    """
    if not holds:
        raise AssertionError(message)
