"""Encodings whose size the host does not know yet: they hold scratch memory until it looks."""

from __future__ import annotations

import time
from collections import deque
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cswap.devices.base import Event, LinkDevice
    from cswap.engine.transfer.staging import Staging
    from cswap.stats.counters import Counters


class Unsized:
    """The encodes of one device whose size is not known, oldest first."""

    def __init__(self, device: LinkDevice, staging: Staging, counters: Counters) -> None:
        """Args: device: that runs them; staging: bounds their memory; counters: the engine's."""
        self._device, self._staging, self._counters = device, staging, counters
        self._events: deque[Event] = deque()

    def add(self, encoded: Event) -> None:
        """An encode was submitted whose size is not known before it has run."""
        self._events.append(encoded)

    def discard(self, encoded: Event) -> None:
        """Its size is known; a second time does nothing."""
        try:  # noqa: SIM105 - `suppress` is three calls, for each encoding
            self._events.remove(encoded)
        except ValueError:
            pass

    def make_room(self, nbytes: int) -> None:
        """Wait until so much scratch memory may be taken: now the host has to look."""
        if not self._events or not self._is_full(nbytes):
            return
        start = time.perf_counter()
        while self._is_full(nbytes):
            try:
                oldest = self._events[0]
            except IndexError:  # another thread has looked
                break
            self._device.wait(oldest)
            self._device.pump()
            if self._events and self._events[0] is oldest:
                self.discard(oldest)  # an interrupt came before its callback was noted
        self._counters.exposed(time.perf_counter() - start)

    def _is_full(self, nbytes: int) -> bool:
        return self._device.scratch_in_use_bytes() + nbytes > self._staging.out_bytes
