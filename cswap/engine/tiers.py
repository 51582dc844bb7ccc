"""What both directions of a swap share: the device, the stores, the counters, one lock."""

from __future__ import annotations

import time
import zlib
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Final

import torch

from cswap.engine.handle import State
from cswap.errors import CorruptEncodingError, InternalError

if TYPE_CHECKING:
    import threading

    from cswap.devices.base import Device, Event, Role
    from cswap.engine.handle import Handle
    from cswap.engine.part import Part
    from cswap.stats.counters import Counters
    from cswap.stores.disk import DiskStore
    from cswap.stores.host import HostStore

BETWEEN_JOBS_S: Final = 1e-4
"""How long to sleep while another thread submits the next job of a handle."""

STUCK_S: Final = 30.0
"""How long another thread may take for that."""

UNDER_WAY: Final = (State.ENCODING, State.IN_FLIGHT, State.FETCHING)
"""States in which a job has yet to be done."""

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
            timeline.job(name, role, handle.label, event, part.codec.name, nbytes)

    def give_back(self, scratch: torch.Tensor | None) -> None:
        """Return scratch memory, if there is any."""
        if scratch is not None:
            self.device.give_back(scratch)

    def settle(self, handle: Handle) -> None:
        """Block until nothing is under way for the handle.

        Raises:
            InternalError: a callback has failed; nothing will ever happen to the handle.
        """
        patience = Patience()
        while handle.state in UNDER_WAY:
            event = handle.event
            if event is not None:
                self.device.wait(event)
            if handle.event is event:  # or between two jobs, on another thread
                patience.pause(handle)
        with self.lock:  # whoever has moved it is done with that
            pass

    def free(self, handle: Handle) -> None:
        """Free the store's copy of a handle that is released, or kept after all.

        Memory that a job still writes is freed by its callback, see `SwapOut`.
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


class Patience:
    """Bounds how long one waits for another thread's next step, which takes microseconds."""

    def __init__(self) -> None:
        self._since: float | None = None

    def pause(self, handle: Handle) -> None:
        """Sleep a little, but for the first time: it may just have been done.

        Raises:
            InternalError: it has been STUCK_S since the first time.
        """
        now = time.monotonic()
        if self._since is None:
            self._since = now
            return
        if now - self._since > STUCK_S:
            raise InternalError(f"a handle has been {handle.state.value!r} for {STUCK_S} s")
        time.sleep(BETWEEN_JOBS_S)


def checksum(x: torch.Tensor) -> int:
    """CRC-32 of a contiguous tensor's bytes."""
    return zlib.crc32(x.view(torch.uint8).cpu().numpy().data)
