"""`SideStreams`: a device's streams beside the user's, for work that is issued without jobs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch


class SideStreams(Protocol):
    """The streams of one device, and the operations on them. All streams and events are torch's.

    Attributes:
        codec, d2h, h2d: for encodes and decodes, and for copies to the host and back.
        memcpy: of target, source, bytes, direction, and the stream's ``cuda_stream``.
    """

    codec: Any
    d2h: Any
    h2d: Any
    memcpy: Callable[[int, int, int, int, int], Any]

    def current(self) -> Any:
        """The user's current stream."""
        ...

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        ...

    def prepare_thread(self) -> None:
        """This thread of our own may use the device, while another one captures a CUDA graph."""
        ...

    def new_event(self) -> Any:
        """One of torch's events."""
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
        """Let a stream of the computation wait for one of torch's events; `stalled_s` counts it."""
        ...

    def wait(self, stream: Any, event: object) -> None:
        """Let a stream wait for an `Event` of the device."""
        ...

    def point(self, event: Any, stream: Any) -> Any:
        """An `Event` of the device for one of torch's that was recorded on this stream."""
        ...

    def allocate(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 of the codec stream's memory.

        Raises:
            MemoryError: there is none left.
        """
        ...
