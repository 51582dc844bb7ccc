"""The contract of a device: operations that the executor needs of hardware, no more.

There are two kinds. Where host memory is the device's own (a CPU), whoever calls does the work. A
device with a link runs it as jobs (`LinkDevice`).

Note [order on a device]
~~~~~~~~~~~~~~~~~~~~~~~~
Work is submitted as jobs. A job runs after the events that it names in ``after`` have fired, and
after nothing else, so every dependency is an event, spelled out. CUDA streams give more order than
that; nothing may rely on it.

The host may be far ahead of the device. A job of a GPU has only issued its work when `submit`
returns. So an order is never kept by waiting on the host: it is written down for the device.

The compute stream is the one on which the user's own operators run. Memory that the user's
operators produced may be read after ``now()`` has fired. Operators that are issued after
``join(event)`` run after the event. These two speak of the thread that calls them.

Note [memory of several streams]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A block of memory belongs to the stream that it was allocated on, and is given to that stream's next
taker as soon as its last reference goes, in the order of that stream. So

* a tensor of the computation may be let go once the compute stream has joined the last job of
  another stream that touches it, or that job's event has fired;
* `allocate` hands out memory of the compute stream: a job on another stream may write it after a
  ``now()`` taken later;
* `scratch` hands out memory of the device's own pool, and lets the stream that will write it first
  wait for its last user. `give_back` says when that is.

Sizes known late: an encode may learn its size while it runs. ``when(event, callback)`` runs the
callback on the host, once the event has fired: in the next `pump` of any thread, or on a thread of
the device's own. Nothing on the compute stream ever waits for a callback.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Final, Literal, Protocol

from cswap.codecs.layout import copy_bytes
from cswap.errors import UnsupportedError
from cswap.pool import size_class

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from cswap.codecs.base import Stream
    from cswap.devices.side_streams import SideStreams

Role = Literal["compute", "codec", "d2h", "h2d"]

FLAT: Final = (1,)
"""Strides of flat memory."""


class Event(Protocol):
    """A point in the work of a device."""

    @property
    def error(self) -> BaseException | None:
        """The exception of the job, if it raised one; meaningful once the event has fired."""
        ...

    @property
    def measured(self) -> bool:
        """Whether the job's time on the device is measured."""
        ...

    @property
    def elapsed_s(self) -> float:
        """Seconds that the job took on the device; 0.0 if that was not measured."""
        ...

    @property
    def span_s(self) -> tuple[float, float]:
        """When the job began and ended, by `time.perf_counter`; zeros where that is not known."""
        ...

    def query(self) -> bool:
        """Whether the event has fired."""
        ...


class Device(abc.ABC):
    """Memory of one device.

    Attributes:
        kind: "cpu", "cuda" or "sim".
        unified: whether host memory is the device's own: encodings are made in the thread that
            saves a tensor, and decoded right where the host store keeps them. Else it is a
            `LinkDevice`.
        section_bytes: larger tensors are swapped in sections of this size, so that the encode of
            one and the copy of another overlap; None: in one piece.
        ready_bytes: of decoded memory that may wait to be asked for (again).
    """

    kind: str
    unified: bool
    section_bytes: int | None = None
    ready_bytes: int

    @abc.abstractmethod
    def allocate(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype
    ) -> torch.Tensor:
        """[sizes] uninitialised memory of the compute stream, for results.

        Made by ``torch.empty_strided``: with cold caches ``torch.empty`` takes longer, to find out
        which of its overloads is meant.

        Args:
            sizes: of the tensor.
            strides: of the tensor, in elements.
            dtype: of its elements.

        Raises:
            MemoryError: there is none left; on a CPU torch's RuntimeError.
        """

    def share(self, memory: torch.Tensor) -> None:  # noqa: B027
        """Computation of this thread will read memory that another thread may have allocated."""

    @abc.abstractmethod
    def scratch(self, nbytes: int, role: Role) -> torch.Tensor:
        """[>= nbytes] uint8 that jobs of this role may write; ends with `give_back`.

        Raises:
            MemoryError: there is none left.
        """

    @abc.abstractmethod
    def give_back(self, scratch: torch.Tensor, after: Event | None = None) -> None:
        """Return scratch memory; its last job is ``after``, or has run."""

    def trim(self, idle_bytes: int) -> None:  # noqa: B027
        """Let go of scratch memory that is idle, but for so many bytes."""

    def now(self) -> Event | None:
        """An event that fires when the computation issued so far by this thread has run.

        None: it has, as on a CPU.
        """
        return None

    def join(self, event: Event, at: Event | None = None) -> None:  # noqa: B027
        """Let computation issued from here on run after the event.

        Args:
            event: of `now`, or of a job.
            at: computation of the stream that this event of `now` was taken of; default: of this
                thread's.
        """

    def pump(self) -> None:  # noqa: B027
        """Run the callbacks whose events have fired, if no other thread is at it."""

    def drain(self) -> None:  # noqa: B027
        """Block until all work submitted so far has run, callbacks included."""

    @property
    def in_line(self) -> Stream | None:
        """For codecs that the computing thread runs itself; None: the current stream."""
        return None

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory, in use and kept for reuse; shared by all engines."""
        return 0

    @property
    def stalled_s(self) -> float:
        """Seconds that computation has waited on the device for joined events, not on the host."""
        return 0.0

    def is_capturing(self) -> bool:
        """Whether this thread's computation is being recorded to be run again (a CUDA graph)."""
        return False

    def damage(self) -> Sequence[str]:
        """Damage that decodes of any engine have met and could not raise, in words; it grows."""
        return ()

    def allocated_bytes(self) -> int | None:
        """Bytes of the device's memory that tensors occupy, ours or not; None if nobody counts."""
        return None

    def relieve_by(self, give_back: Callable[[], None]) -> None:  # noqa: B027
        """When memory is short, call this bound method; it is held weakly."""

    def hold(self, memory: torch.Tensor, after: Event) -> None:  # noqa: B027
        """Keep host memory that nobody else keeps, until work of the device with it has run."""

    host_size: Callable[[int], int] = staticmethod(size_class)
    """Bytes of the buffer that `host_memory` is to be asked for, where so many are needed."""

    @abc.abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 of host memory that this device copies to fastest (pinned, if it can).

        Raises:
            MemoryError: the host has no such memory left.
        """


class LinkDevice(Device):
    """Streams, events, memory and copies of a device with a link.

    Attributes:
        backlog_bytes: bound on the tensors that wait for an encode or a copy, and on the scratch
            memory of those.
    """

    unified = False
    backlog_bytes: int

    @abc.abstractmethod
    def submit(
        self,
        job: Callable[[Stream], None],
        *,
        role: Role,
        after: tuple[Event, ...] = (),
        measure: bool = False,
    ) -> Event:
        """Run ``job(stream)`` on the stream of that role once ``after`` has fired.

        ``measure``: how long it takes on the device is to be known afterwards.

        An exception of the job is kept in the event's ``error``, without its frames, and not raised
        here. An interrupt of a job that runs here (KeyboardInterrupt, or anything else that is no
        `Exception`) is raised; the event then need not fire.
        """

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        nbytes: int,
        *,
        role: Role,
        after: tuple[Event, ...],
    ) -> Event:
        """Copy the first bytes of contiguous tensors, as a job: see `submit`."""
        return self.submit(lambda _: copy_bytes(target, source, nbytes), role=role, after=after)

    @abc.abstractmethod
    def when(self, event: Event, callback: Callable[[], None]) -> None:
        """Call ``callback`` on the host after the event has fired; at once if it already has."""

    @abc.abstractmethod
    def wait(self, event: Event) -> None:
        """Block the host until the event has fired and the callbacks given so far have run."""

    @abc.abstractmethod
    def now(self) -> Event:
        """See `Device.now`."""

    @abc.abstractmethod
    def join(self, event: Event, at: Event | None = None) -> None:
        """See `Device.join`."""

    def side_streams(self) -> SideStreams | None:
        """Its streams, if work can be issued on them without jobs; None: it cannot."""
        return None

    def has_room(self, nbytes: int) -> bool:
        """Whether so much memory may be used to decode ahead; a guess."""
        return True

    def scratch_in_use_bytes(self) -> int:
        """Bytes of scratch memory that have not been given back.

        That is what encodings hold whose size is not known yet.
        """
        return 0

    def bound_scratch(self, nbytes: int) -> None:
        """Rather wait on the device for scratch memory that is free later than hold more of it."""


def without_memory(made: object) -> UnsupportedError:
    """The error for a result of `Device.allocate` that is no plain tensor. Args: made: it."""
    return UnsupportedError(
        f"unpack: memory for a saved tensor is a {type(made).__name__}, which has none: a mode "
        "such as FakeTensorMode is active. Remedy: run backward outside of it."
    )
