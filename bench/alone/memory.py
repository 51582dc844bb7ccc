"""The system's counts of this process's memory (proc(5), getrusage(2)); None where it has none."""

from __future__ import annotations

import os
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from collections.abc import Callable

STATM: Final = Path("/proc/self/statm")
SAMPLE_S: Final = 0.001


def own_bytes() -> int | None:
    """Bytes in memory that belong to this process alone: not its libraries' code."""
    if not STATM.exists():
        return None
    _, resident, shared, *_ = STATM.read_text().split()
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def peak_own_bytes(run: Callable[[], object]) -> int | None:
    """The most `own_bytes` while a function runs, by samples."""
    found, done = [own_bytes()], threading.Event()

    def sample() -> None:
        while not done.wait(SAMPLE_S):
            found.append(own_bytes())

    thread = threading.Thread(target=sample, daemon=True)
    thread.start()
    try:
        run()
    finally:
        done.set()
        thread.join()
    return max((nbytes for nbytes in found if nbytes is not None), default=None)


def fresh_pages() -> int | None:
    """Pages that the system has given this process so far, filled with zeros."""
    try:
        import resource
    except ImportError:  # Windows
        return None
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt
