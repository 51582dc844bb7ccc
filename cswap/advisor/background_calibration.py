"""Calibrates this machine once, in a slow thread beside training.

The thread measures only codecs whose kernels this process has compiled. Numba holds Python's lock
while it compiles: a thread that compiled other kernels would stop the training for seconds. The
next processes extend the calibration by the codecs that they use; ``cswap calibrate`` measures all.

One process per machine calibrates at a time. When it exits early, the next process continues.
``CSWAP_CALIBRATE=0`` switches this off.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
from typing import TYPE_CHECKING, Final

from cswap import cache_folder
from cswap.advisor.calibration import folder, stored
from cswap.log import log

if TYPE_CHECKING:
    from pathlib import Path

SHARE: Final = 0.1
"""Share of a core that the thread may use, on average: it sleeps between codecs."""

WAIT_S: Final = 30.0
"""Seconds before the thread begins: the first steps show which codecs this training uses."""

STALE_S: Final = 3600.0
"""A lock older than this belongs to a process that has ended."""

NICE: Final = 10
"""Niceness of the thread, where threads have their own (Linux)."""

END_S: Final = 10.0
"""How long an exiting process waits for the measurement under way, which takes milliseconds unless
others keep the machine busy."""

_started = threading.Lock()
_ending = threading.Event()


def start_once(kind: str) -> threading.Thread | None:
    """Start to calibrate this kind of device, unless that is done, under way, or switched off."""
    if kind != "cpu" or os.environ.get("CSWAP_CALIBRATE") == "0" or _is_complete(kind):
        return None
    if not _started.acquire(blocking=False):  # held until the process ends
        return None
    thread = threading.Thread(target=_run, args=(kind,), name="cswap-calibration", daemon=True)
    # A thread inside torch while the interpreter shuts down crashes the process.
    atexit.register(_end, thread)
    thread.start()
    return thread


def _is_complete(kind: str) -> bool:
    from cswap.advisor.calibrate import lacking

    found = stored(kind)
    return found is not None and not lacking(found)


class _EndedError(Exception):
    """The process exits."""


def _end(thread: threading.Thread) -> None:
    _ending.set()
    thread.join(END_S)


def _check() -> None:
    if _ending.is_set():
        raise _EndedError


def _run(kind: str) -> None:
    lock = folder() / f"{kind}.lock"
    try:
        if _ending.wait(WAIT_S) or not _take(lock):
            return
        try:
            with contextlib.suppress(_EndedError):
                _calibrate(kind)
        finally:
            lock.unlink(missing_ok=True)
    except Exception:  # the user's training goes on with the default rates
        log.debug("calibration in the background failed", exc_info=True)


def _calibrate(kind: str) -> None:
    from cswap.advisor import calibrate

    with contextlib.suppress(AttributeError, OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), NICE)
    start = time.thread_time()
    for _ in calibrate.steps(kind, compiled_only=True, check=_check):
        now = time.thread_time()
        if _ending.wait((now - start) * (1 - SHARE) / SHARE):
            return
        start = time.thread_time()
    log.info("calibrated this machine's %s in the background", kind)


def _take(lock: Path) -> bool:
    cache_folder.make(lock.parent)
    with contextlib.suppress(OSError):
        if time.time() - lock.stat().st_mtime > STALE_S:
            lock.unlink()
    try:
        os.close(os.open(lock, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o600))
    except FileExistsError:
        return False
    return True
