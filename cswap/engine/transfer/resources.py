"""Resources of swapping on one device: the device, the stores, the counters, one lock."""

from __future__ import annotations

import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from cswap.codecs.layout import bytes_of
from cswap.devices.base import FLAT, LinkDevice, without_memory
from cswap.devices.cpu import CpuDevice
from cswap.errors import CorruptEncodingError, InternalError, to_raise

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    from cswap.devices.base import Device
    from cswap.engine.transfer.disk_queue import DiskQueue
    from cswap.engine.transfer.stored import Free, Held, Stored
    from cswap.pool import BufferPool
    from cswap.stats.counters import Counters
    from cswap.stores.disk import DiskStore

DAMAGED: Final = "verify: a tensor encoded by {} to {} bytes came back changed."


@dataclass(frozen=True, slots=True)
class Resources:
    """Where a swap goes through.

    Attributes:
        device: the device.
        host: the host tier.
        disk: where encodings go that the host tier has no room for; None: nowhere.
        files: reads and writes the disk's files on a thread of its own; None on a unified device.
        counters: of the engine.
        watch: frees the memory of an encoding after its death, by the function that is given.
        lock: under which handles change.
        seed: of stochastic rounding.
        verify: whether tensors that come back are compared with those that went out.
        damage: errors of decodes whose results may have been used by now; every later unpack
            raises the first of them.
        damages_before: that the device had met before this engine came.
    """

    device: Device
    host: BufferPool
    disk: DiskStore | None
    files: DiskQueue | None
    counters: Counters
    watch: Callable[[Stored, Held, Free], None]
    lock: threading.Lock
    seed: int
    verify: bool
    damage: list[CorruptEncodingError] = field(default_factory=list)
    damages_before: int = 0

    @property
    def over_link(self) -> LinkDevice:
        """The device, for those who know that there is a link."""
        if not isinstance(self.device, LinkDevice):
            raise InternalError(f"there is no link to the {self.device.kind}'s own memory")
        return self.device

    @property
    def on_host(self) -> CpuDevice:
        """The device, for those who know that its memory is the host's."""
        if not isinstance(self.device, CpuDevice):
            raise InternalError(f"there is a link to the {self.device.kind}'s own memory")
        return self.device

    def raise_damage(self) -> None:
        """Whether the device has met damage that it could not raise.

        Raises:
            CorruptEncodingError: it has; values that were computed since may be wrong.
        """
        found = self.device.damage()[self.damages_before :]
        for text in found[len(self.damage) :]:
            self.counters.fall_back("decode", text)
            self.damage.append(CorruptEncodingError(text))
        if self.damage:
            raise to_raise(self.damage[0])


def checksum(*tensors: torch.Tensor) -> int:
    """CRC-32 of the bytes of contiguous tensors, one after the other."""
    found = 0
    for x in tensors:
        found = zlib.crc32(bytes_of(x.cpu()).data, found)
    return found


def flat_memory(device: Device, dtype: torch.dtype, numel: int) -> torch.Tensor:
    """New memory of a device, [numel] flat.

    Raises:
        MemoryError: there is none.
        UnsupportedError: a mode makes tensors without memory.
    """
    try:
        out = device.allocate((numel,), FLAT, dtype=dtype)
    except RuntimeError as error:  # torch's, for a CPU's memory as well
        raise MemoryError(f"swap-in of {numel * dtype.itemsize} bytes: {error}") from None
    if type(out) is not torch.Tensor:
        raise without_memory(out)
    return out
