"""The CPU as a device: the thread that saves a tensor encodes it, and its memory is the host's."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

import torch

from cswap.devices.base import Device


@dataclass(frozen=True, slots=True)
class CpuStream:
    """Where a codec runs: in the thread that calls it, with help of others.

    Attributes:
        threads: how many of them, the caller among them.
    """

    threads: int


class CpuDevice(Device):
    """Memory of the CPU. Thread-safe.

    Attributes:
        in_line: for codecs that the computing thread runs itself.
    """

    kind = "cpu"
    unified = True
    ready_bytes = 8 << 20

    def __init__(self) -> None:
        """Make a device; engines share one, see `cpu_device`."""
        self.in_line = CpuStream(max(1, torch.get_num_threads()))

    # Not a function: torch's own one is called at once. Whatever the default device.
    allocate = staticmethod(partial(torch.empty_strided, device=torch.device("cpu")))

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`."""
        try:
            return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
        except RuntimeError as error:  # torch's CPU allocator has no exception of its own for this
            raise MemoryError(str(error)) from error


@cache
def cpu_device() -> CpuDevice:
    """The device, which engines share."""
    return CpuDevice()
