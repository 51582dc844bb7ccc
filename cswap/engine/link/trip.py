"""`Trip`: notes of one tensor's way over a link, for the advisor and the timeline."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.devices.base import Role
    from cswap.engine.transfer.notes import Notes
    from cswap.stats.counters import Counters
    from cswap.stats.step_trace import SavedTensor

ENCODE: Final = "encode"
DECODE: Final = "decode"


class Trip:
    """Of a tensor with a handle, in a step that learns or is traced.

    Attributes:
        is_timed: whether the codec's work is to be timed on the device.
        is_drawn: whether the copies are, too, for a timeline.
    """

    __slots__ = ("_codec", "_counters", "_label", "_n_parts", "_notes", "_took_s", "is_drawn",
                 "is_timed")  # fmt: skip

    def __init__(
        self,
        counters: Counters,
        label: SavedTensor,
        notes: Notes | None,
        codec: str,
        n_parts: int,
        *,
        is_timed: bool,
    ) -> None:
        """Nothing has happened yet.

        Args:
            counters: of the engine.
            label: name of the tensor on a timeline.
            notes: of whoever chose the codec.
            codec: its name.
            n_parts: of the tensor.
            is_timed: see above.
        """
        self._counters, self._label, self._codec = counters, label, codec
        self._notes = notes if notes is not None and notes.learns else None
        self._n_parts, self._took_s = n_parts, {ENCODE: list[float](), DECODE: list[float]()}
        self.is_drawn = counters.timeline is not None
        self.is_timed = is_timed or self.is_drawn

    def encoded(self, raw_nbytes: int, nbytes: int) -> None:
        """The tensor's encoding has so many bytes."""
        if self._notes is not None:
            self._notes.note_encoded(self._codec, raw_nbytes, nbytes)

    def took(
        self, work: str, role: Role, nbytes: int, seconds: float, span_s: tuple[float, float]
    ) -> None:
        """Work of the device has run.

        Args:
            work: its name on a timeline.
            role: of its stream.
            nbytes: that it has read or written.
            seconds: of the device.
            span_s: when it began and ended, by `time.perf_counter`.
        """
        timeline = self._counters.timeline
        if timeline is not None:
            timeline.job(work, role, self._label, span_s, self._codec, nbytes)
        times = self._took_s.get(work)
        if times is None:
            return
        times.append(seconds)
        encode_s, decode_s = (seconds, 0.0) if work == ENCODE else (0.0, seconds)
        self._counters.took(self._codec, encode_s=encode_s, decode_s=decode_s)
        both = [*self._took_s[ENCODE], *self._took_s[DECODE]]
        if self._notes is not None and len(both) == 2 * self._n_parts:
            self._notes.note_round_trip(self._codec, sum(both))
