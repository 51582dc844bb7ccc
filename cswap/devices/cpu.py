"""The CPU as a device: worker threads that really run beside the computation.

Kernels release the GIL. The compute stream is the calling thread itself.

Note [a job that was begun and not finished]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
Whoever runs a job may not get to its end: a worker can die, a Ctrl-C can end the thread's statement
anywhere, a fork takes all threads but one away. So an event knows its runner. A runner that lives
on gives its claim up, wherever a fault stops it. Whether a runner still lives, whoever waits for
the event looks now and then. Without one, the waiter runs the job itself, or the callbacks that are
left. A job and a callback may therefore run twice, the first time not to the end: they must bear
that.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import queue
import threading
import time
import weakref
from collections import deque
from dataclasses import dataclass
from functools import cache, partial
from typing import TYPE_CHECKING, Final

import torch

from cswap.devices.base import Device, Event, Role
from cswap.errors import InternalError, without_frames
from cswap.log import log
from cswap.pool import BufferPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.codecs.base import Stream

    Job = Callable[[Stream], None]

STUCK_S: Final = 0.05
"""How long a waiter sleeps before it looks whether its job still has a runner."""

IDLE_SCRATCH_BYTES: Final = 256 << 10
"""Scratch memory that is kept from one encode to the next. To allocate more takes no longer than to
encode a fiftieth of it: malloc has the pages (freed_memory.py)."""

NOBODY: Final = 0
"""In place of a thread's identity (those are never 0)."""

END_S: Final = 10.0
"""How long an exiting process waits for the jobs that workers have begun."""


@dataclass(frozen=True, slots=True)
class CpuStream:
    """Where a job runs: on one of the workers (one thread) or in the caller (all of them)."""

    threads: int


class CpuEvent:
    """Fires when its job has run; settles when the callbacks have, too.

    Attributes:
        runner: identity of the thread that runs the job, or ran it; NOBODY before that.
    """

    __slots__ = (
        "_callbacks",
        "_lock",
        "_settled",
        "_waiters",
        "after",
        "elapsed_s",
        "error",
        "fired",
        "job",
        "runner",
        "span_s",
    )

    def __init__(self, job: Job | None, after: tuple[Event, ...] = ()) -> None:
        self.job = job
        self.after = after
        self.error: BaseException | None = None
        self.elapsed_s = 0.0
        self.span_s = (0.0, 0.0)
        self.runner = NOBODY
        self.fired = self._settled = job is None
        self._lock = threading.Lock()
        self._waiters: threading.Event | None = None
        self._callbacks: deque[Callable[[], None]] = deque()

    measured: Final = True

    def query(self) -> bool:
        """See `Event.query`."""
        return self.fired

    def claim(self, thread: int, instead_of: int = NOBODY) -> bool:
        """Whether this thread is the one that is to run the job, or to go on with it."""
        if self._settled:
            return False
        with self._lock:
            mine = self.runner == instead_of
            if mine:
                self.runner = thread
            return mine

    def add(self, callback: Callable[[], None]) -> bool:
        """Keep a callback for later; False if the event has already settled."""
        if self._settled:
            return False
        with self._lock:
            if not self._settled:
                self._callbacks.append(callback)
            return not self._settled

    def fire(self) -> None:
        """The job has run: run the callbacks, then let the waiters go."""
        self.fired = True
        self.job, self.after = None, ()  # their memory can go
        while True:
            with self._lock:
                if not self._callbacks:
                    self._settled = True
                    waiters = self._waiters
                    break
                callback = self._callbacks[0]  # left there until it is done
            self._call(callback)
            with self._lock:
                if self._callbacks and self._callbacks[0] is callback:
                    self._callbacks.popleft()
        if waiters is not None:
            waiters.set()

    def _call(self, callback: Callable[[], None]) -> None:
        try:
            callback()
        except Exception as error:
            log.exception("a callback failed")
            self.error = self.error or without_frames(error)

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
    backlog_bytes = 4 << 20  # the goal is to save memory: let little of it wait
    ready_bytes = 8 << 20

    def __init__(self, workers: int) -> None:
        """Args: workers: threads; 0 runs every job in the thread that submits it."""
        self._n_workers = workers
        self.overlaps = workers > 0
        self._in_line = CpuStream(max(1, torch.get_num_threads()))
        self._beside = CpuStream(1)
        # The host's memory is the device's: what the encoders need is the model's again at once.
        self._scratch = BufferPool(_bytes, 0.0, always_idle=IDLE_SCRATCH_BYTES)
        self._lost_jobs = 0
        self._begin()
        _devices.add(self)

    def _begin(self) -> None:
        # State of this process's threads: made anew in a forked child, which has none of them.
        self._queue: queue.SimpleQueue[CpuEvent | None] = queue.SimpleQueue()
        self._workers: list[_Worker] = []
        self._start_lock = threading.Lock()
        self._here = threading.local()
        self._ended = False

    def submit(
        self, job: Job, *, role: Role, after: tuple[Event, ...] = (), measure: bool = False
    ) -> Event:
        """See `Device.submit`. A job submitted by a worker runs right there."""
        event = CpuEvent(job, after)
        on_worker = getattr(self._here, "is_worker", False)
        if role == "compute" or on_worker or not self._start():
            self._run(event, self._beside if on_worker else self._in_line)
        else:
            self._queue.put(event)
        return event

    def when(self, event: Event, callback: Callable[[], None]) -> None:
        """See `Device.when`."""
        if not _own(event).add(callback):
            callback()

    def wait(self, event: Event) -> None:
        """See `Device.wait`.

        A job that no worker has begun is run here, which is sooner. So is one that nobody runs any
        more, see Note [a job that was begun and not finished].
        """
        own = _own(event)
        self._run(own, self._in_line)
        while not own.sleep(STUCK_S):
            self._take_over(own)

    def _wait_fired(self, event: CpuEvent) -> None:
        # Not for its callbacks: the job that waits may have been submitted by one of them.
        self._run(event, self._in_line)
        while not event.query():
            event.sleep(STUCK_S)
            if not event.query():
                self._take_over(event)

    def _take_over(self, event: CpuEvent) -> None:
        runner, me = event.runner, threading.get_ident()
        if runner not in (NOBODY, me) and any(t.ident == runner for t in threading.enumerate()):
            return
        if self._run(event, self._in_line, instead_of=runner) and runner != NOBODY:
            self._lost_jobs += 1

    @property
    def in_line(self) -> CpuStream:
        """See `Device.in_line`."""
        return self._in_line

    @property
    def lost_jobs(self) -> int:
        """See `Device.lost_jobs`."""
        return self._lost_jobs

    def now(self) -> Event:
        """See `Device.now`: operators on a CPU have run when they return."""
        return FIRED

    def join(self, event: Event, at: Event | None = None) -> None:
        """See `Device.join`."""
        self.wait(event)

    # Not a function: torch's own one is called at once. Whatever the default device.
    allocate = staticmethod(partial(torch.empty_strided, device=torch.device("cpu")))

    def scratch(self, nbytes: int, role: Role) -> torch.Tensor:
        """See `Device.scratch`."""
        loan = self._scratch.take(nbytes)
        assert loan is not None  # the pool has no limit
        return loan.buffer

    def give_back(self, scratch: torch.Tensor, after: Event | None = None) -> None:
        """See `Device.give_back`."""
        self._scratch.give_back(scratch)

    def trim(self, idle_bytes: int) -> None:
        """See `Device.trim`."""
        self._scratch.trim(idle_bytes)

    def drain(self) -> None:
        """See `Device.drain`."""
        while not self._queue.empty():
            with contextlib.suppress(queue.Empty):
                event = self._queue.get_nowait()
                if event is None:  # for a worker, which is to end
                    self._queue.put(None)
                    break
                self.wait(event)
        self.hold_still()
        self.go_on()

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`."""
        return _bytes(nbytes)

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory, in use and idle."""
        return self._scratch.in_use_bytes + self._scratch.idle_bytes

    def _start(self) -> bool:
        # Whether there are workers: none from the moment at which the process ends.
        if len(self._workers) < self._n_workers and not self._ended:
            with self._start_lock:
                while len(self._workers) < self._n_workers and not self._ended:
                    worker = _Worker(self._queue, self._work, f"cswap-worker-{len(self._workers)}")
                    self._workers.append(worker)
                    worker.start()
        return self._n_workers > 0 and not self._ended

    def _work(self, event: CpuEvent) -> None:
        self._here.is_worker = True
        # Kernels called from here must not spread over torch's threads as well.
        self._run(event, self._beside)

    def _run(self, event: CpuEvent, stream: CpuStream, instead_of: int = NOBODY) -> bool:
        # Run the job, or go on with it, if this thread can claim it; whether it could.
        me = threading.get_ident()
        mine = finished = False
        try:
            mine = event.claim(me, instead_of)
            if mine:
                if not event.fired:
                    self._run_job(event, stream)
                event.fire()
            finished = True
        finally:
            # A fault, from the claim on: a worker finishes it, or whoever waits for it.
            if not finished and event.claim(NOBODY, instead_of=me):
                self._lost_jobs += stream is self._beside
                self._queue.put(event)
        return mine

    def _run_job(self, event: CpuEvent, stream: CpuStream) -> None:
        for earlier in event.after:
            if not earlier.query():
                self._wait_fired(_own(earlier))
        job, began, start = event.job, time.perf_counter(), time.thread_time()
        try:
            if job is not None:
                job(stream)
        except Exception as error:
            event.error = without_frames(error)
        except BaseException as error:
            if stream is self._in_line:  # an interrupt: it goes up
                raise
            event.error = RuntimeError(f"a job ended its thread: {error!r}")
        event.elapsed_s = time.thread_time() - start
        event.span_s = (began, time.perf_counter())

    def end(self) -> None:
        """Let the workers finish the jobs that they have begun, and no others, and wait for them.

        A daemon thread that is inside torch when the interpreter goes takes the process down with
        it. Jobs that nobody has begun are run by whoever waits for them.
        """
        self._ended = True
        for _ in self._workers:
            self._queue.put(None)
        for worker in self._workers:
            worker.stopping = True
        for worker in self._workers:
            if worker.thread is not threading.current_thread():
                worker.thread.join(END_S)

    def hold_still(self) -> None:
        """Return once no worker is inside a job; none begins one before `go_on`."""
        self._start_lock.acquire()
        for worker in self._workers:
            worker.busy.acquire()

    def go_on(self) -> None:
        """See `hold_still`."""
        for worker in self._workers:
            worker.busy.release()
        self._start_lock.release()

    def forked(self) -> None:
        """In a forked child: its threads are gone. Jobs of theirs are run by whoever waits."""
        self._begin()


class _Worker:
    """A thread that runs jobs.

    Attributes:
        busy: held while it runs one.
        stopping: it ends after the job that it runs.
    """

    def __init__(
        self,
        jobs: queue.SimpleQueue[CpuEvent | None],
        work: Callable[[CpuEvent], None],
        name: str,
    ) -> None:
        self._jobs, self._work = jobs, work
        self.busy = threading.Lock()
        self.stopping = False
        self.thread = threading.Thread(target=self._loop, name=name, daemon=True)

    def start(self) -> None:
        self.thread.start()

    def _loop(self) -> None:
        while not self.stopping:
            event = self._jobs.get()
            if event is None:
                return
            with self.busy:
                self._one(event)
            del event  # nothing of the last job stays alive

    def _one(self, event: CpuEvent) -> None:
        try:
            self._work(event)
        except BaseException as error:  # a job's SystemExit, say: the next job needs a worker
            log.warning("a job ended its worker (%r); it is run again by who waits", error)


_devices: weakref.WeakSet[CpuDevice] = weakref.WeakSet()


def _own(event: Event) -> CpuEvent:
    if not isinstance(event, CpuEvent):
        raise InternalError(f"event {event!r} is not of this device")
    return event


def _bytes(nbytes: int) -> torch.Tensor:
    try:
        return torch.empty(nbytes, dtype=torch.uint8, device="cpu")
    except RuntimeError as error:  # torch's CPU allocator has no exception of its own for this
        raise MemoryError(str(error)) from error


@cache
def cpu_device(workers: int) -> CpuDevice:
    """The device with that many workers; engines share it and so its threads."""
    return CpuDevice(workers)


def _on_each(what: Callable[[CpuDevice], None]) -> None:
    for device in list(_devices):
        what(device)


atexit.register(_on_each, CpuDevice.end)
# A child inherits locks as they are: no worker may hold one of the engine's at that moment.
os.register_at_fork(
    before=lambda: _on_each(CpuDevice.hold_still),
    after_in_parent=lambda: _on_each(CpuDevice.go_on),
    after_in_child=lambda: _on_each(CpuDevice.forked),
)
