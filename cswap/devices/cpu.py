"""The CPU as a device: worker threads that really run beside the computation.

Kernels release the GIL. The compute stream is the calling thread itself.
"""

from __future__ import annotations

import queue
import threading
import time
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Final

import torch

from cswap.devices.base import Device, Event, Role
from cswap.errors import InternalError
from cswap.pool import BufferPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.codecs.base import Stream

    Job = Callable[[Stream], None]

STUCK_S: Final = 0.05
"""How long a waiter sleeps before it looks whether its job still has a live worker."""


@dataclass(frozen=True, slots=True)
class CpuStream:
    """Where a job runs: on one of the workers (one thread) or in the caller (all of them)."""

    threads: int


class CpuEvent:
    """Fires when its job has run; settles when the callbacks have, too."""

    __slots__ = (
        "_callbacks",
        "_claimed",
        "_fired",
        "_lock",
        "_settled",
        "_waiters",
        "after",
        "elapsed_s",
        "error",
        "job",
        "span_s",
    )

    def __init__(self, job: Job | None, after: tuple[Event, ...] = ()) -> None:
        self.job = job
        self.after = after
        self.error: BaseException | None = None
        self.elapsed_s = 0.0
        self.span_s = (0.0, 0.0)
        self._claimed = job is None
        self._fired = self._settled = job is None
        self._lock = threading.Lock()
        self._waiters: threading.Event | None = None
        self._callbacks: list[Callable[[], None]] = []

    def query(self) -> bool:
        """See `Event.query`."""
        return self._fired

    def claim(self) -> bool:
        """Whether the caller is the one who is to run the job."""
        if self._claimed:
            return False
        with self._lock:
            claimed, self._claimed = self._claimed, True
            return not claimed

    def add(self, callback: Callable[[], None]) -> bool:
        """Keep a callback for later; False if the event has already fired."""
        if self._settled:
            return False
        with self._lock:
            if not self._settled:
                self._callbacks.append(callback)
            return not self._settled

    def fire(self) -> None:
        """The job has run: run the callbacks, then let the waiters go."""
        self.job, self.after = None, ()  # what the job referred to can go
        self._fired = True
        while True:
            with self._lock:
                callbacks, self._callbacks = self._callbacks, []
                if not callbacks:
                    self._settled = True
                    waiters = self._waiters
                    break
            for callback in callbacks:
                self._call(callback)
        if waiters is not None:
            waiters.set()

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except BaseException as error:
            self.error = self.error or error

    def sleep(self, timeout_s: float) -> bool:
        """Block until settled, at most ``timeout_s``; whether it is."""
        if self._settled:
            return True
        with self._lock:
            if self._settled:
                return True
            if self._waiters is None:
                self._waiters = threading.Event()
        return self._waiters.wait(timeout_s)


FIRED: Final = CpuEvent(None)


class CpuDevice(Device):
    """Workers that encode and decode beside the computation."""

    kind = "cpu"
    unified = True
    backlog_bytes = 4 << 20  # memory is what is being saved: let little of it wait
    ready_bytes = 8 << 20

    def __init__(self, workers: int) -> None:
        """Args: workers: threads; 0 runs every job in the thread that submits it."""
        self._workers = workers
        self.overlaps = workers > 0
        self._in_line = CpuStream(max(1, torch.get_num_threads()))
        self._beside = CpuStream(1)
        self._queue: queue.SimpleQueue[CpuEvent] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []
        self._start_lock = threading.Lock()
        self._scratch = BufferPool(_bytes)
        self._here = threading.local()

    def submit(self, job: Job, *, role: Role, after: tuple[Event, ...] = ()) -> Event:
        """See `Device.submit`. A job submitted by a worker runs right there."""
        event = CpuEvent(job, after)
        on_worker = getattr(self._here, "is_worker", False)
        if role == "compute" or self._workers == 0 or on_worker:
            event.claim()
            self._run(event, self._beside if on_worker else self._in_line)
        else:
            self._start()
            self._queue.put(event)
        return event

    def when(self, event: Event, callback: Callable[[], None]) -> None:
        """See `Device.when`."""
        if not _own(event).add(callback):
            callback()

    def defer(self, callback: Callable[[], None]) -> None:
        """See `Device.defer`. `SimpleQueue.put` is documented to be safe in finalisers."""
        if self._threads:
            self._queue.put(CpuEvent(lambda _: callback()))

    def wait(self, event: Event) -> None:
        """See `Device.wait`.

        A job that no worker has begun is run here: that is sooner, and a worker that died cannot
        hang the step.
        """
        own = _own(event)
        if own.claim():
            self._run(own, self._in_line)
        while not own.sleep(STUCK_S):
            pass

    def _wait_fired(self, event: CpuEvent) -> None:
        # Not for its callbacks: the job that waits may have been submitted by one of them.
        if event.claim():
            self._run(event, self._in_line)
        while not event.query():
            event.sleep(STUCK_S)

    def now(self) -> Event:
        """See `Device.now`: operators on a CPU have run when they return."""
        return FIRED

    def join(self, event: Event) -> None:
        """See `Device.join`."""
        self.wait(event)

    def allocate(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """See `Device.allocate`."""
        return torch.empty(numel, dtype=dtype)

    def scratch(self, nbytes: int) -> torch.Tensor:
        """See `Device.scratch`."""
        return self._scratch.take(nbytes)

    def give_back(self, scratch: torch.Tensor) -> None:
        """See `Device.give_back`."""
        self._scratch.give_back(scratch)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`."""
        return _bytes(nbytes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory, in use and idle."""
        return self._scratch.in_use_bytes + self._scratch.idle_bytes

    def _start(self) -> None:
        if len(self._threads) < self._workers:
            with self._start_lock:
                while len(self._threads) < self._workers:
                    name = f"cswap-worker-{len(self._threads)}"
                    thread = threading.Thread(target=self._work, name=name, daemon=True)
                    thread.start()
                    self._threads.append(thread)

    def _work(self) -> None:
        self._here.is_worker = True
        # Kernels called from here must not spread over torch's threads as well.
        while True:
            event = self._queue.get()
            if event.claim():
                self._run(event, self._beside)

    def _run(self, event: CpuEvent, stream: CpuStream) -> None:
        # The caller has claimed it.
        for earlier in event.after:
            if not earlier.query():
                self._wait_fired(_own(earlier))
        job, began, start = event.job, time.perf_counter(), time.thread_time()
        try:
            if job is not None:
                job(stream)
        except BaseException as error:
            event.error = error
        event.elapsed_s = time.thread_time() - start
        event.span_s = (began, time.perf_counter())
        event.fire()


def _own(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise InternalError(f"event {event!r} is not of this device")
    return event


def _bytes(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8)
    except RuntimeError as error:  # torch's CPU allocator has no exception of its own for this
        raise MemoryError(str(error)) from error


@cache
def cpu_device(workers: int) -> CpuDevice:
    """The device with that many workers; engines share it and so its threads."""
    return CpuDevice(workers)
