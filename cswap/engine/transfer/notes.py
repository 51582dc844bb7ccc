"""The notes that whoever chose a tensor's codec takes of its swap: `Notes`."""

from __future__ import annotations

from typing import Protocol


class TripNotes(Protocol):
    """Takes notes of how long the swap of a tensor took."""

    def note_round_trip(self, codec: str, device_s: float) -> None:
        """Note the seconds of encode and decode together."""
        ...


class Notes(TripNotes, Protocol):
    """Takes notes of how the swap of a tensor went."""

    @property
    def learns(self) -> bool:
        """Whether the outcome should be noted."""
        ...

    def note_encoded(self, codec: str, raw_nbytes: int, nbytes: int) -> None:
        """Note that the tensor was encoded, with the codec that did it."""
        ...
