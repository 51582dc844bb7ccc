"""`Meter`: seconds that work of a device's streams takes, seen when it has run."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cswap.devices.base import Role
    from cswap.devices.side_streams import SideStreams
    from cswap.engine.link.trip import Trip


class _Work(NamedTuple):
    # That has been issued. began, ended: events.
    began: Any
    ended: Any
    trip: Trip
    name: str
    role: Role
    nbytes: int


class Meter:
    """Of one link. Used under its lock."""

    def __init__(self, streams: SideStreams) -> None:
        """Args: streams: of the device."""
        self._streams = streams
        self._issued: deque[_Work] = deque()

    def begin(self, stream: Any) -> Any:
        """The work that is issued next on a stream is timed; gives the event of its beginning."""
        began = self._streams.new_event(timing=True)
        began.record(stream)
        return began

    def end(self, began: Any, stream: Any, trip: Trip, name: str, role: Role, nbytes: int) -> None:
        """The work has been issued. Args: see `begin`, and `Trip.took`."""
        ended = self._streams.new_event(timing=True)
        ended.record(stream)
        self._issued.append(_Work(began, ended, trip, name, role, nbytes))

    def look(self) -> None:
        """Tell the trips of the work that has run by now."""
        issued = self._issued
        while issued and issued[0].ended.query():
            work = issued.popleft()
            origin, at_s = self._streams.origin()
            began_s, ended_s = (
                at_s + origin.elapsed_time(event) / 1e3 for event in (work.began, work.ended)
            )
            seconds = work.began.elapsed_time(work.ended) / 1e3
            work.trip.took(work.name, work.role, work.nbytes, seconds, (began_s, ended_s))
