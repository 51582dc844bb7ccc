"""What both directions of a swap share: the device, the stores, the counters, one lock."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from cswap.engine.handle import State
from cswap.errors import CorruptEncodingError

if TYPE_CHECKING:
    import threading

    from cswap.devices.base import Device, Event, Role
    from cswap.engine.handle import Handle
    from cswap.engine.part import Part
    from cswap.engine.stats import Counters
    from cswap.stores.disk import DiskStore
    from cswap.stores.host import HostStore

BETWEEN_JOBS_S: Final = 1e-4
"""How long to sleep while another thread submits the next job of a handle."""

DAMAGED: Final = "verify: a tensor encoded by {} to {} bytes came back changed."


@dataclass(frozen=True, slots=True)
class Tiers:
    """Where a swap goes through.

    Attributes:
        device: that runs the jobs.
        host: the host tier.
        disk: where encodings go that the host tier has no room for; None: nowhere.
        counters: what is counted.
        lock: under which handles change.
        verify: whether what comes back is compared with what went out.
        damage: errors of decodes whose results may have been used by now; every later unpack
            raises the first of them.
    """

    device: Device
    host: HostStore
    disk: DiskStore | None
    counters: Counters
    lock: threading.Lock
    verify: bool
    damage: list[CorruptEncodingError] = field(default_factory=list)

    def note_damage(self) -> None:
        """After a decode: whether the device has met damage that it could not raise."""
        found = self.device.take_damage()
        if found:
            self.counters.fall_back("decode", found)
            self.damage.append(CorruptEncodingError(found))

    def draw(
        self, name: str, role: Role, handle: Handle, part: Part, event: Event, nbytes: int
    ) -> None:
        """Put a job that has run on the timeline, if one is being recorded."""
        timeline = self.counters.timeline
        if timeline is not None:
            timeline.job(name, role, handle, event, part.codec.name, nbytes)

    def give_back(self, scratch: torch.Tensor | None) -> None:
        """Return scratch memory, if there is any."""
        if scratch is not None:
            self.device.give_back(scratch)

    def settle(self, handle: Handle) -> None:
        """Block until nothing is under way for the handle."""
        while handle.state in (State.ENCODING, State.IN_FLIGHT, State.FETCHING):
            event = handle.event
            if event is not None:
                self.device.wait(event)
            else:  # between two jobs, on another thread
                time.sleep(BETWEEN_JOBS_S)

    def free(self, handle: Handle) -> None:
        """Free what the store holds of a handle that is released, or kept after all.

        What a job still writes is freed by its callback, see `SwapOut`.
        """
        for part in handle.parts:
            if part.stored and (part.host is not None or part.file is not None):
                self.free_part(part)

    def free_part(self, part: Part) -> None:
        """Free the store's copy of a part that no job uses any more; once is enough."""
        with self.lock:
            host, file = part.host, part.file
            part.host = part.file = None
        if host is not None:
            self.host.give_back(host)
            self.counters.hold(host=-host.numel())
        if file is not None and self.disk is not None:
            self.disk.release(file)


def checksum(x: torch.Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(x.view(torch.uint8).cpu().numpy().data)
