"""Callbacks that run once an event of a CUDA device has fired."""

from __future__ import annotations

import atexit
import threading
import time
import weakref
from collections import deque
from typing import TYPE_CHECKING, Final

import torch

from cswap.errors import without_frames
from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.devices.cuda_events import CudaEvent

NAPS_S: Final = (5e-4, 4e-3)
"""How long the thread leaves callbacks to computing threads before it looks whether one has passed
by; and at most, after each nap in which one has was twice as long. To wake takes 0.1 ms, of the
computing thread's time, too: it has to get the interpreter back."""

COALESCE_S: Final = 2e-4
"""How long the thread sleeps after an event has fired, to find more callbacks due."""

END_S: Final = 10.0
"""How long an exiting process waits for the thread."""


class Callbacks:
    """Callbacks of one device, by the stream of their event. Thread-safe."""

    def __init__(self, index: int) -> None:
        """Args: index: of the device."""
        self._index = index
        self._due: dict[int, deque[tuple[CudaEvent, Callable[[], None]]]] = {}
        self._running = threading.RLock()
        self._counting = threading.Lock()
        self._wanted = threading.Event()
        self._is_wanted = False  # the same, without a call
        self._passes = 0  # of threads that have run what was due
        self._nap_s = NAPS_S[0]
        self._stopping = False
        self._thread: threading.Thread | None = None
        _all_callbacks.add(self)

    def add(self, event: CudaEvent, callback: Callable[[], None]) -> None:
        """Run the callback once the event has fired. Events of one stream fire in order."""
        self._due.setdefault(event.stream.cuda_stream, deque()).append((event, callback))
        with self._counting:  # after that: an interrupt in between would be waited for
            event.pending += 1
        if not self._is_wanted:
            self._is_wanted = True
            self._wanted.set()  # an interrupt before it leaves all to the computing threads
            self._start()

    def run_due(self) -> None:
        """Run the callbacks whose event has fired, unless another thread is at it."""
        # While the thread goes to sleep, the first is False for a moment.
        if not (self._is_wanted or any(self._due.values())):
            return
        running, acquired = self._running, False
        nested = running._is_owned()  # type: ignore[attr-defined]  # noqa: SLF001
        try:
            acquired = running.acquire(blocking=False)
            if acquired:
                self._passes += 1
                for due in list(self._due.values()):
                    while due and due[0][0].query():
                        self._call_first(due)
        finally:
            # Or an interrupt came when it had been acquired, and before that was noted.
            if acquired or (not nested and running._is_owned()):  # type: ignore[attr-defined]  # noqa: SLF001
                running.release()

    def run_all(self) -> None:
        """Run the callbacks whose event has fired, those of other threads included."""
        with self._running:
            self.run_due()

    def _call_first(self, due: deque[tuple[CudaEvent, Callable[[], None]]]) -> None:
        first = event, callback = due[0]
        try:
            due.popleft()  # before the call: a callback may run those that follow
            callback()
        except Exception as error:
            log.exception("a callback failed")
            event.error = event.error or without_frames(error)
        except BaseException:  # an interrupt: it runs once more
            if not due or due[0] is not first:
                due.appendleft(first)
            raise
        with self._counting:
            event.pending -= 1

    def _start(self) -> None:
        if self._thread is None and not self._stopping:
            with self._counting:
                if self._thread is None:
                    name = f"cswap-cuda{self._index}"
                    self._thread = threading.Thread(target=self._run, name=name, daemon=True)
                    self._thread.start()

    def _run(self) -> None:
        torch.cuda.set_device(self._index)
        allow_during_capture()
        while not self._stopping:
            self._wanted.wait()
            try:
                self._next()
            except Exception as error:  # computing threads go on without this one for a moment
                log.warning("cuda:%d: callbacks: %s", self._index, error)
                time.sleep(NAPS_S[1])

    def _next(self) -> None:  # a frame of its own: nothing of the last callback stays alive
        passes = self._passes
        time.sleep(self._nap_s)
        if self._passes != passes:
            self._nap_s = min(2 * self._nap_s, NAPS_S[1])
            return
        self._nap_s = NAPS_S[0]
        heads = [due[0][0] for due in list(self._due.values()) if due]
        if heads:
            heads[0].recorded.synchronize()
            time.sleep(COALESCE_S)
            self.run_due()
        elif not self._stopping:
            self._is_wanted = False
            self._wanted.clear()
            if any(self._due.values()):  # added meanwhile
                self._is_wanted = True
                self._wanted.set()

    def end(self) -> None:
        """Stop before the interpreter goes: a thread inside torch would take the process down."""
        self._stopping = True
        self._wanted.set()
        if self._thread is not None and self._thread is not threading.current_thread():
            self._thread.join(END_S)


def allow_during_capture() -> None:
    """Let this thread ask the device while another one captures a CUDA graph.

    By default, such a question makes the capture invalid (cuThreadExchangeStreamCaptureMode).
    """
    try:
        from cuda.bindings import driver

        mode = driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_THREAD_LOCAL
        driver.cuThreadExchangeStreamCaptureMode(mode)
    except Exception as error:  # without it, captures have to wait for `synchronize`
        log.debug("capture mode of a thread: %s", error)


_all_callbacks: weakref.WeakSet[Callbacks] = weakref.WeakSet()


def _end_all() -> None:
    for callbacks in list(_all_callbacks):
        callbacks.end()


atexit.register(_end_all)
