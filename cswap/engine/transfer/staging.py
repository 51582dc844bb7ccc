"""Bounds the bytes under way over a link by what the step moves: `Staging`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.devices.base import LinkDevice

FEWEST: Final = 3
"""Tensors of the step's largest size that may be under way: one is encoded, one is copied, and one
waits. With fewer, the link would stand still between two tensors."""

STEP_SHARE: Final = 16
"""Of the bytes that leave in a step, 1/STEP_SHARE may be under way: small tensors are saved in
bursts, and the link needs some milliseconds of them."""

SPARING: Final = 1, 32
"""The same two where memory counts more than the time of a step, as it does for a goal: most of its
steps go by slots, and one that is looked at is not to hold more than those."""


class Staging:
    """How many bytes may wait for a link, or be decoded ahead of their use.

    A share of the device's memory alone is no bound: on a large device it is more than a small
    model saves, and then the peak is higher than without swapping.

    Attributes:
        ahead_bytes: bound on memory that is decoded ahead.
        out_bytes: bound on tensors on their way out, and on the scratch memory of their encodings;
            within the device's.
    """

    def __init__(self, device: LinkDevice) -> None:
        """Args: device: its own bounds hold as well."""
        self._device = device
        self._fewest, self._step_share = FEWEST, STEP_SHARE
        self._sent_bytes = 0
        self._largest = self._largest_before = 0
        self.ahead_bytes = self.out_bytes = 0

    def spare(self, *, spares: bool) -> None:
        """Whether memory counts more than time, from the next step on."""
        self._fewest, self._step_share = SPARING if spares else (FEWEST, STEP_SHARE)

    def sends(self, nbytes: int) -> None:
        """A tensor of so many bytes leaves."""
        self._sent_bytes += nbytes
        if nbytes > self._largest:
            self._largest = nbytes
            if self._fewest * nbytes > self.ahead_bytes:
                self._bound(self._fewest * nbytes)

    def begin_step(self) -> None:
        """A step begins: the one before shows how much leaves."""
        largest = max(self._largest, self._largest_before)
        self._bound(max(self._fewest * largest, self._sent_bytes // self._step_share))
        self._largest_before, self._largest, self._sent_bytes = self._largest, 0, 0

    def _bound(self, nbytes: int) -> None:
        self.ahead_bytes = nbytes
        self.out_bytes = min(nbytes, self._device.backlog_bytes)
        self._device.bound_scratch(self.out_bytes)
