"""`SideStreams`: a device's streams beside the user's."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class NewEvent(Protocol):
    """Makes one of torch's events. Args: timing: it is to have a time."""

    def __call__(self, *, timing: bool = False) -> Any: ...  # noqa: D102


class SideStreams(Protocol):
    """The streams of one device, and the operations on them. All streams and events are torch's.

    Attributes:
        codec, d2h, h2d: for encodes and decodes, and for copies to the host and back.
        memcpy: of target, source, bytes, direction, and the stream's ``cuda_stream``.
        new_event: see above.
    """

    codec: Any
    d2h: Any
    h2d: Any
    memcpy: Callable[[int, int, int, int, int], Any]
    new_event: NewEvent

    def current(self) -> Any:
        """The user's current stream."""
        ...

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        ...

    def prepare_thread(self) -> None:
        """This thread of our own may use the device, while another one captures a CUDA graph."""
        ...

    def before(self) -> Any:
        """The state that `leave` brings back."""
        ...

    def enter(self, stream: Any) -> None:
        """Make a stream the current one; to be called inside of a ``try``."""
        ...

    def leave(self, before: Any) -> None:
        """Undo `enter`."""
        ...

    def stall(self, stream: Any, event: Any) -> None:
        """Let a stream of the computation wait for an event; `stalled_s` counts it."""
        ...

    def origin(self) -> tuple[Any, float]:
        """An event with timing that has fired, and `time.perf_counter` of it, in seconds."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 of the codec stream's memory.

        Raises:
            MemoryError: there is none left.
        """
        ...
