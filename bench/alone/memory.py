"""The system's counts of this process's memory (proc(5), getrusage(2)); None where it has none."""

from __future__ import annotations

from pathlib import Path
from typing import Final

STATUS: Final = Path("/proc/self/status")
CLEAR_REFS: Final = Path("/proc/self/clear_refs")
FORGET_PEAK: Final = "5"


def resident_bytes(*, peak: bool = False) -> int | None:
    """Bytes of the process that are in memory now, or were at most since `forget_peak`."""
    if not STATUS.exists():
        return None
    name = "VmHWM:" if peak else "VmRSS:"
    line = next(line for line in STATUS.read_text().splitlines() if line.startswith(name))
    return int(line.split()[1]) << 10  # the unit is always kB


def forget_peak() -> None:
    """Count the peak anew from now on."""
    if CLEAR_REFS.exists():
        CLEAR_REFS.write_text(FORGET_PEAK)


def fresh_pages() -> int | None:
    """Pages that the system has given this process so far, filled with zeros."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
