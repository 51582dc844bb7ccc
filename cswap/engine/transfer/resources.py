"""Resources of swapping on one device: the device, the stores, the counters, one lock."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

from cswap.codecs.layout import bytes_of
from cswap.devices.base import LinkDevice
from cswap.devices.cpu import CpuDevice
from cswap.errors import CorruptEncodingError, InternalError, to_raise

if TYPE_CHECKING:
    import threading
    from collections.abc import Callable

    import torch

    from cswap.devices.base import Device
    from cswap.engine.transfer.disk_queue import DiskQueue
    from cswap.engine.transfer.handle import Handle
    from cswap.engine.transfer.stored import Stored
    from cswap.pool import BufferPool
    from cswap.remat.record import Remat
    from cswap.stats.counters import Counters
    from cswap.stores.disk import DiskStore

LOOK_EVERY_S: Final = 1e-4
"""How long to sleep while another thread encodes a tensor."""

STUCK_S: Final = 30.0
"""How long another thread may take for that."""

DAMAGED: Final = "verify: a tensor encoded by {} to {} bytes came back changed."


def _cannot_recompute(_remat: Remat) -> torch.Tensor:
    raise InternalError("this executor computes nothing again")


@dataclass(frozen=True, slots=True)
class Resources:
    """Where a swap goes through.

    Attributes:
        device: the device.
        host: the host tier.
        disk: where encodings go that the host tier has no room for; None: nowhere.
        files: reads and writes the disk's files on a thread of its own; None on a unified device.
        counters: of the engine.
        lock: under which handles change.
        seed: of stochastic rounding.
        verify: whether tensors that come back are compared with those that went out.
        damage: errors of decodes whose results may have been used by now; every later unpack
            raises the first of them.
        damages_before: that the device had met before this engine came.
        recompute: gives the memory of a tensor, [n] flat, that is computed again.
    """

    device: Device
    host: BufferPool
    disk: DiskStore | None
    files: DiskQueue | None
    counters: Counters
    lock: threading.Lock
    seed: int
    verify: bool
    damage: list[CorruptEncodingError] = field(default_factory=list)
    damages_before: int = 0
    recompute: Callable[[Remat], torch.Tensor] = _cannot_recompute

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

    def free_stored(self, handle: Handle) -> None:
        """Free the encoding of a handle that is released."""
        with self.lock:
            stored, handle.stored = handle.stored, None
        if stored is None:
            return
        if stored.host is not None:
            self.counters.hold(host=-stored.host.numel())
        self.free(stored)

    def free(self, stored: Stored) -> None:
        """Free an encoding's memory, or its file."""
        host, file = stored.host, stored.file
        if host is not None:
            self.host.give_back(host)
        if file is not None and self.disk is not None:
            self.disk.release(file)


class Patience:
    """Bounds how long one waits for another thread's next step, which takes microseconds."""

    def __init__(self) -> None:
        self._since: float | None = None

    def pause(self, state: str) -> None:
        """Sleep a little, but for the first time: it may just have been done.

        Args:
            state: of what is waited for.

        Raises:
            InternalError: it has been STUCK_S since the first time.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            return
        if now - self._since > STUCK_S:
            raise InternalError(f"a tensor has been {state!r} for {STUCK_S} s")
        time.sleep(LOOK_EVERY_S)


def checksum(*tensors: torch.Tensor) -> int:
    """CRC-32 of the bytes of contiguous tensors, one after the other."""
    found = 0
    for x in tensors:
        found = zlib.crc32(bytes_of(x.cpu()).data, found)
    return found
