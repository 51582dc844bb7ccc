"""Ways to train by their names, and the figures that each of them can give."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from bench.workloads.methods import DEMO, ON_CPU
from bench.workloads.saved_bytes import Held

if TYPE_CHECKING:
    from bench.workloads.methods import Method
    from cswap.api import InstallHandle

PINS: Final = True
"""Asks torch's `save_on_cpu` to pin. Without a GPU nothing is pinned then, but it does copy; not
asked to, it returns the very tensor, which is on the host already, and there is nothing to measure.
"""


def method(mode: str) -> Method:
    """The way to train that a mode's name stands for: the demo's or the benchmark's."""
    return DEMO.get(mode) or ON_CPU[mode]


def held(handle: InstallHandle | None) -> Held:
    """Bytes that the mode's engine holds now."""
    if handle is None:
        return Held()
    stats = handle.stats
    return Held(device_bytes=stats.device_bytes, host_bytes=stats.host_bytes)


@dataclass(frozen=True, slots=True)
class Totals:
    """Bytes of everything encoded so far, before and after."""

    raw_bytes: int = 0
    encoded_bytes: int = 0


def totals(handle: InstallHandle | None) -> Totals:
    """Bytes that the mode's engine has encoded so far."""
    if handle is None:
        return Totals()
    stats = handle.stats
    return Totals(raw_bytes=stats.raw_bytes, encoded_bytes=stats.encoded_bytes)


def scratch_bytes(handle: InstallHandle | None) -> int:
    """Encoders' output buffers: shared by all engines of a process, and there before this one."""
    return 0 if handle is None else handle.engine.scratch_bytes


def settle(handle: InstallHandle | None) -> None:
    """Wait until the mode's engine has nothing under way."""
    if handle is not None:
        handle.engine.synchronize()


def report(handle: InstallHandle) -> dict[str, Any]:
    """cswap's own record: its statistics, and the decision for each saved tensor."""
    decisions = [str(explanation).partition("\n")[0] for explanation in handle.engine.explain()]
    return {"stats": handle.stats.to_dict(), "decisions": decisions}
