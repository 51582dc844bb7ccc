"""The contract of a device: operations that swapping needs of hardware, no more.

There are two kinds. Where host memory is the device's own (a CPU), whoever calls does the work
(`CpuDevice`). A device with a link has streams (`LinkDevice`).

Note [order on a device]
~~~~~~~~~~~~~~~~~~~~~~~~
The host issues a step's work long before a GPU runs it. So an order is never kept by waiting on the
host: each dependency is an event that a stream waits for.

The compute stream is the one on which the user's own operators run. Memory that the user's
operators produced may be read after ``now()`` has fired. Operators that are issued after
``join(moment)`` run after the moment. These two speak of the thread that calls them.

Note [memory of several streams]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A block of memory belongs to the stream that it was allocated on, and is given to that stream's next
taker as soon as its last reference goes, in the order of that stream. So

* a tensor of the computation may be let go once the compute stream waits for the last work of
  another stream that touches it, or that work's event has fired;
* `allocate` hands out memory of the compute stream: work of another stream may write it after an
  event that the compute stream records later.
"""

from __future__ import annotations

import abc
from typing import TYPE_CHECKING, Any, Final, Literal

from cswap.errors import UnsupportedError
from cswap.pool import size_class

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import torch

    from cswap.devices.side_streams import SideStreams

Role = Literal["compute", "codec", "d2h", "h2d"]

FLAT: Final = (1,)
"""Strides of flat memory."""


class Device(abc.ABC):
    """Memory of one device.

    Attributes:
        kind: "cpu" or "cuda".
        unified: whether host memory is the device's own: a `CpuDevice`, else a `LinkDevice`.
        ready_bytes: of decoded memory that may wait to be asked for (again).
    """

    kind: str
    unified: bool
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

    def now(self) -> Any:
        """A moment that comes when the computation issued so far by this thread has run.

        None: it has, as on a CPU.
        """
        return None

    def join(self, moment: Any) -> None:  # noqa: B027
        """Let computation issued from here on run after a moment, of `now`."""

    def drain(self) -> None:  # noqa: B027
        """Block until all work issued so far has run."""

    @property
    def stalled_s(self) -> float:
        """Seconds that computation has waited on the device for swaps, not on the host."""
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

    host_size: Callable[[int], int] = staticmethod(size_class)
    """Bytes of the buffer that `host_memory` is to be asked for, where so many are needed."""

    @abc.abstractmethod
    def host_memory(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 of host memory that this device copies to fastest (pinned, if it can).

        Raises:
            MemoryError: the host has no such memory left.
        """


class LinkDevice(Device):
    """Streams and memory of a device with a link.

    Attributes:
        part_bytes: larger tensors are encoded in parts of this size, so that the encode of one
            and the copy of another overlap; None: in one piece.
        backlog_bytes: bound on the tensors that wait for an encode or a copy.
    """

    unified = False
    part_bytes: int | None = None
    backlog_bytes: int

    @abc.abstractmethod
    def side_streams(self) -> SideStreams:
        """Its streams beside the user's."""

    def has_room(self, nbytes: int) -> bool:
        """Whether so much memory may be used to decode ahead; a guess."""
        return True

    @abc.abstractmethod
    def hold(self, memory: torch.Tensor, after: Any) -> None:
        """Keep host memory that nobody else keeps, until one of torch's events has fired."""

    @abc.abstractmethod
    def let_go_held(self) -> None:
        """Let go of memory that `hold` keeps and whose event has fired."""


def without_memory(made: object) -> UnsupportedError:
    """The error for a result of `Device.allocate` that is no plain tensor. Args: made: it."""
    return UnsupportedError(
        f"unpack: memory for a saved tensor is a {type(made).__name__}, which has none: a mode "
        "such as FakeTensorMode is active. Remedy: run backward outside of it."
    )
