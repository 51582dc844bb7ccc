"""`Meter`: seconds that work of a device's streams takes, seen when it has run."""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from cswap.devices.base import Role
    from cswap.devices.side_streams import SideStreams
    from cswap.engine.link.trip import Trip


class _Job(NamedTuple):
    # One that has been issued. began, ended: events.
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
        self._jobs: deque[_Job] = deque()

    def begin(self, stream: Any) -> Any:
        """The work that is issued next on a stream is timed; gives the event of its beginning."""
        began = self._streams.new_event(timing=True)
        began.record(stream)
        return began

    def end(self, began: Any, stream: Any, trip: Trip, name: str, role: Role, nbytes: int) -> None:
        """The work has been issued. Args: see `begin`, and `Trip.took`."""
        ended = self._streams.new_event(timing=True)
        ended.record(stream)
        self._jobs.append(_Job(began, ended, trip, name, role, nbytes))

    def look(self) -> None:
        """Tell the trips of the work that has run by now."""
        jobs = self._jobs
        while jobs and jobs[0].ended.query():
            job = jobs.popleft()
            origin, at_s = self._streams.origin()
            began_s, ended_s = (
                at_s + origin.elapsed_time(event) / 1e3 for event in (job.began, job.ended)
            )
            seconds = job.began.elapsed_time(job.ended) / 1e3
            job.trip.took(job.name, job.role, job.nbytes, seconds, (began_s, ended_s))
