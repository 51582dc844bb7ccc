"""Ways to train by their names, and the figures that each of them can give."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

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


def totals(handle: InstallHandle | None) -> tuple[int, int]:
    """Raw and encoded bytes of everything that the mode's engine has encoded so far."""
    return (0, 0) if handle is None else (handle.stats.raw_bytes, handle.stats.encoded_bytes)


def scratch_bytes(handle: InstallHandle | None) -> int:
    """Encoders' output buffers: shared by all engines of a process, and there before this one."""
    return 0 if handle is None else handle.engine.scratch_bytes


def settle(handle: InstallHandle | None) -> None:
    """Wait until the mode's engine has nothing under way."""
    if handle is not None:
        handle.engine.synchronize()
