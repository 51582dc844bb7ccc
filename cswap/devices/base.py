"""The contract of a device: what the executor needs of hardware, no more.

Note [order on a device]
~~~~~~~~~~~~~~~~~~~~~~~~
Work is submitted as jobs. A job runs after the events that it names in ``after`` have fired, and
after nothing else: two jobs on one stream may overlap (CPU workers do), so every dependency is an
event, spelled out. CUDA streams give more order than that; nothing may rely on it.

The compute stream is the one on which the user's own operators run. Memory that the user's
operators produced may be read after ``device.now()`` has fired; memory for them must be written
before ``device.join(event)``. `allocate` hands out memory that operators issued before may still
use, so it may be written after a ``now()`` taken later than that. These three speak of the thread
that calls them: computing threads do, callbacks never need to.

A job of a GPU has only issued its work when it returns, and keeps nothing alive. The submitter
keeps what the job works on until its event has fired: the allocator may give the memory to someone
else as soon as the last reference is gone (no record_stream).

Sizes known late: a job that encodes learns its size while it runs. ``when(event, callback)`` runs
the callback on the host, once the event has fired, on a thread of the device's choice: there the
size is known and the next job is submitted. Nothing on the compute stream ever waits for it.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.codecs.base import Stream

Role = Literal["compute", "codec", "d2h", "h2d"]


class Event(Protocol):
    """A point in the work of a device."""

    @property
    def error(self) -> BaseException | None:
        """What the job raised, if it did; meaningful once the event has fired."""
        ...

    @property
    def elapsed_s(self) -> float:
        """Seconds that the job took on the device; meaningful once the event has fired.

        On a CPU of the core that ran it: while it waits for one it takes nothing from others.
        """
        ...

    @property
    def span_s(self) -> tuple[float, float]:
        """When the job began and ended, by `time.perf_counter`; zeros where that is not known."""
        ...

    def query(self) -> bool:
        """Whether the event has fired."""
        ...


class Device(abc.ABC):
    """Streams, events, memory and copies of one device.

    Attributes:
        kind: "cpu", "cuda" or "sim".
        unified: whether encodings can be decoded right where the host store keeps them.
        section_bytes: larger tensors are swapped in sections of this size, so that the encode of
            one and the copy of another overlap; None: in one piece.
        backlog_bytes: where host and device memory are one, tensors waiting for an encode may
            hold this much; past it the computing thread encodes itself. Elsewhere: see
            `staging_full`.
        ready_bytes: results may be decoded this far ahead of their use.
        overlaps: whether jobs of roles other than "compute" run beside the computation.
    """

    kind: str
    unified: bool
    section_bytes: int | None = None
    backlog_bytes: int
    ready_bytes: int
    overlaps: bool

    @abc.abstractmethod
    def submit(
        self, job: Callable[[Stream], None], *, role: Role, after: tuple[Event, ...] = ()
    ) -> Event:
        """Run ``job(stream)`` on the stream of that role once ``after`` has fired.

        On a CPU, role "compute" runs the job before this returns. An exception of the job is kept
        in the event's ``error``, without its frames, and not raised here. An interrupt of a job
        that runs here (KeyboardInterrupt, or anything else that is no `Exception`) is raised; the
        event then need not fire.
        """

    @abc.abstractmethod
    def when(self, event: Event, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the host after the event has fired; at once if it already has."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Block the host until the event has fired and the callbacks given so far have run."""

    @abc.abstractmethod
    def now(self) -> Event:
        """An event that fires when the computation issued so far by this thread has run."""

    @abc.abstractmethod
    def join(self, event: Event) -> None:
        """Let computation issued from here on run after the event; on a CPU: wait for it."""

    @abc.abstractmethod
    def allocate(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """[numel] uninitialised device memory, for results that computation will read."""

    def share(self, memory: torch.Tensor) -> None:  # noqa: B027
        """Computation of this thread will read what another thread's `allocate` may have given."""

    @abc.abstractmethod
    def scratch(self, nbytes: int) -> torch.Tensor:
        """[>= nbytes] uint8 of device memory for one encode or decode; ends with `give_back`.

        Memory of the device's own: no computation uses it, so it may be written at once.
        """

    @abc.abstractmethod
    def give_back(self, scratch: torch.Tensor) -> None:
        """Return scratch memory whose last job has run."""

    def trim(self, idle_bytes: int) -> None:  # noqa: B027
        """Let go of scratch memory that is idle, but for so many bytes."""

    def drain(self) -> None:  # noqa: B027
        """Block until all work submitted so far has run, callbacks included; after an interrupt."""

    @property
    def lost_jobs(self) -> int:
        """Jobs that their thread did not finish, and that another one ran."""
        return 0

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory, in use and kept for reuse; shared by all engines."""
        return 0

    @property
    def stalled_s(self) -> float:
        """Seconds that computation has waited on the device for joined events, not on the host."""
        return 0.0

    def is_capturing(self) -> bool:
        """Whether what this thread computes is being recorded to be run again (a CUDA graph)."""
        return False

    def take_damage(self) -> str:
        """What went wrong in decodes that have run, and could not be said in time; else ""."""
        return ""

    def has_room(self, nbytes: int) -> bool:
        """Whether so much memory may be used to decode ahead; a guess."""
        return True

    def staging_full(self) -> bool:
        """Whether so much scratch is in use that the computing thread should wait for some.

        What limits a swap-out on a GPU is the link: encodings queue up in scratch memory.
        """
        return False

    @abc.abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 of host memory that this device copies to fastest (pinned, if it can).

        Raises:
            MemoryError: the host has no such memory left.
        """
