"""Records of the exact simulator."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from fractions import Fraction


@dataclass(slots=True)
class Item:
    """A tensor's choice, and the current place of its bytes."""

    index: int
    nbytes: int
    encoded: int
    action: str
    raw: bool
    prefetch: int
    backward: int
    rank: tuple[int, int]
    # nowhere, device, leaving (raw), sent (encoded), host, coming, decoding, dropped, dead, again
    at: str = "nowhere"
    copies: int = 0  # bytes of raw and encoded copies on the device
    scratch: int = 0  # bytes that an encode writes
    fetched: bool = False
    uses_left: int = 0


@dataclass(slots=True)
class Job:
    """A job on one resource: its remaining seconds at full speed, and the action at its end."""

    left_s: Fraction
    end: Callable[[], None]


@dataclass(frozen=True, slots=True)
class Replayed:
    """The exact results of `Replay.run`.

    Attributes:
        step_s: end of the last operator.
        peak_bytes: maximum of device memory.
        host_peak_bytes: maximum of host memory.
        average_bytes: mean of device memory over time.
        link_bytes: bytes copied in both directions together.
        feasible: whether both budgets hold all the time and no tensor is lost.
        exposed_s: exposed seconds by cause, as `Simulation.exposed`.
    """

    step_s: Fraction
    peak_bytes: int
    host_peak_bytes: int
    average_bytes: Fraction
    link_bytes: int
    feasible: bool
    exposed_s: dict[str, Fraction]
