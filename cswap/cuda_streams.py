"""The current CUDA stream, with few calls.

`torch.cuda.current_stream` looks for the device by name, asks whether CUDA is there, and reads
environment variables: 4 us on the host of an H200, and 11 us for ``with torch.cuda.stream``. An
engine needs the current stream about ten times for a tensor.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final, NamedTuple

import torch

if TYPE_CHECKING:
    Identity = tuple[int, int, int]

CYCLES_PER_S: Final = 2e9
"""Of a GPU's clock, at the most."""

_known: Final[dict[Identity, torch.cuda.Stream]] = {}


class Before(NamedTuple):
    """The state that `enter` has changed.

    Attributes:
        stream: was the current one of the entered stream's device.
        device: was the current device.
    """

    stream: Identity
    device: int


def current(index: int) -> torch.cuda.Stream:
    """The current stream of a device, in this thread. CUDA must have been initialised.

    Args:
        index: of the device.
    """
    identity: Identity = torch._C._cuda_getCurrentStream(index)  # noqa: SLF001
    found = _known.get(identity)
    if found is None:
        stream_id, device_index, device_type = identity
        found = _known[identity] = torch.cuda.Stream(  # type: ignore[no-untyped-call]
            stream_id=stream_id, device_index=device_index, device_type=device_type
        )
    return found


def before(index: int) -> Before:
    """What `leave` takes back. Read apart from `enter`, since an interrupt may end that one.

    Args:
        index: of the device whose stream is to be entered.
    """
    return Before(
        torch._C._cuda_getCurrentStream(index),  # noqa: SLF001
        torch._C._cuda_getDevice(),  # noqa: SLF001
    )


def enter(stream: torch.cuda.Stream) -> None:
    """Make a stream the current one, and its device; to be called inside of a ``try``."""
    _set((stream.stream_id, stream.device_index, stream.device_type))


def leave(before: Before) -> None:
    """Undo `enter`."""
    _set(before.stream)  # which makes its device the current one
    if before.device != before.stream[1]:
        torch._C._cuda_setDevice(before.device)  # noqa: SLF001


def is_capturing() -> bool:
    """Whether the current stream's work is being recorded as a CUDA graph."""
    return bool(torch._C._cuda_isCurrentStreamCapturing())  # noqa: SLF001


def spin(seconds: float) -> None:
    """Keep the current stream busy at least so long, so that the host gets ahead of it."""
    torch.cuda._sleep(int(CYCLES_PER_S * seconds))  # type: ignore[no-untyped-call] # noqa: SLF001


def _set(identity: Identity) -> None:
    stream_id, index, device_type = identity
    torch._C._cuda_setStream(  # noqa: SLF001
        stream_id=stream_id, device_index=index, device_type=device_type
    )
