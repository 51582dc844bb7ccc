"""The CPU as a device: the thread that saves a tensor encodes it, and its memory is the host's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from typing import Final

import torch

from cswap.devices.base import HostDevice
from cswap.pool import BufferPool

IDLE_SCRATCH_BYTES: Final = 256 << 10
"""Scratch memory that is kept from one encode to the next. To allocate more takes no longer than to
encode a fiftieth of it: malloc has the pages (freed_memory.py)."""


@dataclass(frozen=True, slots=True)
class CpuStream:
    """Where a codec runs: in the thread that calls it, with help of others.

    Attributes:
        threads: how many of them, the caller among them.
    """

    threads: int


class CpuDevice(HostDevice):
    """Memory of the CPU. Thread-safe."""

    kind = "cpu"
    ready_bytes = 8 << 20

    def __init__(self) -> None:
        """Make a device; engines share one, see `cpu_device`."""
        self._in_line = CpuStream(max(1, torch.get_num_threads()))
        # The host's memory is the device's: what the encoders need is the model's again at once.
        self._scratch = BufferPool(_bytes, 0.0, always_idle=IDLE_SCRATCH_BYTES)

    @property
    def in_line(self) -> CpuStream:
        """See `HostDevice.in_line`."""
        return self._in_line

    # Not a function: torch's own one is called at once. Whatever the default device.
    allocate = staticmethod(partial(torch.empty_strided, device=torch.device("cpu")))

    def scratch(self, nbytes: int) -> torch.Tensor:
        """See `HostDevice.scratch`."""
        loan = self._scratch.take(nbytes)
        assert loan is not None  # the pool has no limit
        return loan.buffer

    def give_back(self, scratch: torch.Tensor) -> None:
        """See `HostDevice.give_back`."""
        self._scratch.give_back(scratch)

    def trim(self, idle_bytes: int) -> None:
        """See `HostDevice.trim`."""
        self._scratch.trim(idle_bytes)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`."""
        return _bytes(nbytes)

    @property
    def scratch_bytes(self) -> int:
        """See `HostDevice.scratch_bytes`."""
        return self._scratch.in_use_bytes + self._scratch.idle_bytes


def _bytes(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # torch's CPU allocator has no exception of its own for this
        raise MemoryError(str(error)) from error


@cache
def cpu_device() -> CpuDevice:
    """The device, which engines share."""
    return CpuDevice()
