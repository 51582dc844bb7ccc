"""Events of a CUDA device."""

from __future__ import annotations

from typing import NamedTuple

import torch


class Moment(NamedTuple):
    """A moment of a stream. Who waits for it on the same stream waits for nothing.

    Attributes:
        event: torch's, recorded on the stream.
        stream: the stream.
    """

    event: torch.cuda.Event
    stream: torch.cuda.Stream


def cuda_event(*, timing: bool = False) -> torch.cuda.Event:
    """One of torch's events. A thread that waits for it sleeps instead of spinning."""
    return torch.cuda.Event(enable_timing=timing, blocking=True)  # type: ignore[no-untyped-call]
