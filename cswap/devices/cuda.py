"""A CUDA device: three streams beside the user's own, and pinned memory on the host.

Note [order without waiting]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A job issues its work when it is submitted; streams wait for events on the device, the host waits
for nothing. What has to wait for the device on the host's side (an encoding's size, freeing what a
copy has read) is done by callbacks, on one thread per stream, which sleeps until the event has
fired. Events of one stream fire in order, so a thread that waits for the first waits for no more
than it has to.

Note [memory of several streams]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~~
The caching allocator gives a freed block back to the stream that it was allocated on, at once:
other streams may still be using it. So tensors of the computation are held until the event of the
job that reads them has fired (no record_stream, which would keep memory for longer than needed);
scratch memory is allocated on the codec stream and reused through a pool of its own, after the
last job that touches it.
"""

from __future__ import annotations

import queue
import threading
import time
from functools import cache
from typing import TYPE_CHECKING, Final, cast

import torch

from cswap.codecs import gpu
from cswap.devices.base import Device, Event, Role
from cswap.errors import InternalError, without_frames
from cswap.log import log
from cswap.pool import BufferPool

if TYPE_CHECKING:
    from collections.abc import Callable

    from cswap.codecs.base import Stream

    Job = Callable[[Stream], None]

ROLES: Final[tuple[Role, ...]] = ("compute", "codec", "d2h", "h2d")

BACKLOG_SHARE: Final = 32
"""Of the device's memory, 1/BACKLOG_SHARE may be on its way out, but no more than BACKLOG_BYTES."""

BACKLOG_BYTES: Final = 1 << 30

READY_SHARE: Final = 16
"""Of the device's memory, 1/READY_SHARE may be decoded ahead of its use, if there is room."""

RESERVE_SHARE: Final = 20
"""Of the device's memory, 1/RESERVE_SHARE stays free of what is decoded ahead."""

TIME_EVERY: Final = 8
"""Joins between two whose wait is timed: two more events cost some microseconds."""

ASK_EVERY: Final = 32
"""Questions for room between two looks at the allocator, which take longer than a launch."""


class CudaEvent:
    """Fires when the device has run the job; settles when the callbacks have run, too."""

    __slots__ = ("_settled", "_started", "callbacks", "error", "recorded", "role")

    def __init__(self, role: Role) -> None:
        self.role = role
        self._started: torch.cuda.Event | None = None
        self.recorded = _event()
        self.error: BaseException | None = None
        self.callbacks = 0
        self._settled = threading.Condition()

    def query(self) -> bool:
        """See `Event.query`."""
        return bool(self.recorded.query())  # type: ignore[no-untyped-call]

    @property
    def elapsed_s(self) -> float:
        """See `Event.elapsed_s`."""
        return 0.0 if self._started is None else self._started.elapsed_time(self.recorded) / 1e3

    @property
    def span_s(self) -> tuple[float, float]:
        """See `Event.span_s`: by the moment at which the host knew the device's clock."""
        if self._started is None:
            return 0.0, 0.0
        event, at_s = _origin()
        return (
            at_s + event.elapsed_time(self._started) / 1e3,
            at_s + event.elapsed_time(self.recorded) / 1e3,
        )

    def start(self, stream: torch.cuda.Stream) -> None:
        """The job begins here on the stream."""
        self._started = _event()
        self._started.record(stream)

    def expect(self) -> None:
        """A callback has been promised."""
        with self._settled:
            self.callbacks += 1

    def done(self) -> None:
        """A callback has run."""
        with self._settled:
            self.callbacks -= 1
            self._settled.notify_all()

    def settle(self) -> None:
        """Block until the callbacks promised so far have run."""
        with self._settled:
            while self.callbacks:
                self._settled.wait()


class CudaDevice(Device):
    """One GPU. Thread-safe: autograd calls unpack from threads of its own."""

    kind = "cuda"
    unified = False
    section_bytes = 64 << 20
    overlaps = True

    def __init__(self, index: int) -> None:
        """Args: index: torch's index of the device."""
        self.index = index
        self.device = torch.device("cuda", index)
        total = torch.cuda.get_device_properties(index).total_memory
        self.backlog_bytes = min(total // BACKLOG_SHARE, BACKLOG_BYTES)
        self._total_bytes = total
        self._free_bytes = total
        self._asked = 0
        self.ready_bytes = total // READY_SHARE
        with torch.cuda.device(index):
            self._streams: dict[str, torch.cuda.Stream] = {
                role: torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
                for role in ROLES[1:]
            }
        self._scratch = BufferPool(self._allocate_scratch)
        self._watchers: dict[str, _Watcher] = {}
        self._watchers_lock = threading.Lock()
        self._pageable = False
        self._joined = 0
        _origin()
        self._stalled_s = 0.0

    def submit(self, job: Job, *, role: Role, after: tuple[Event, ...] = ()) -> Event:
        """See `Device.submit`. The job only issues work, on the thread that submits it."""
        event = CudaEvent(role)
        stream = self._stream(role)
        with torch.cuda.stream(stream):
            for earlier in after:
                stream.wait_event(_own(earlier).recorded)
            event.start(stream)
            try:
                job(cast("Stream", stream))
            except Exception as error:
                # Its frames hold the job's tensors, and the event outlives them.
                event.error = _as_memory_error(without_frames(error))
            event.recorded.record(stream)
        return event

    def when(self, event: Event, callback: Callable[[], None]) -> None:
        """See `Device.when`. Runs on the thread that watches the event's stream."""
        own = _own(event)
        own.expect()
        self._watcher(own.role).put(own, callback)

    def wait(self, event: Event) -> None:
        """See `Device.wait`."""
        own = _own(event)
        own.recorded.synchronize()
        own.settle()

    def now(self) -> Event:
        """See `Device.now`."""
        event = CudaEvent("compute")
        event.recorded.record(torch.cuda.current_stream(self.device))
        return event

    def join(self, event: Event) -> None:
        """See `Device.join`: the stream waits, the host does not."""
        stream, awaited = torch.cuda.current_stream(self.device), _own(event).recorded
        self._joined += 1
        if self._joined % TIME_EVERY or self.is_capturing():
            stream.wait_event(awaited)
            return
        timed = CudaEvent("compute")
        timed.start(stream)
        stream.wait_event(awaited)
        timed.recorded.record(stream)
        self.when(timed, lambda: self._add_stall(TIME_EVERY * timed.elapsed_s))

    @property
    def stalled_s(self) -> float:
        """See `Device.stalled_s`; estimated from one join in TIME_EVERY."""
        return self._stalled_s

    def _add_stall(self, seconds: float) -> None:
        self._stalled_s += seconds  # by one thread only, that of the compute stream's events

    def allocate(self, dtype: torch.dtype, numel: int) -> torch.Tensor:
        """See `Device.allocate`: of the current stream's memory."""
        return self._with_retry(lambda: torch.empty(numel, dtype=dtype, device=self.device))

    def share(self, memory: torch.Tensor) -> None:
        """See `Device.share`; nothing happens on the stream that the memory is of."""
        memory.record_stream(torch.cuda.current_stream(self.device))

    def scratch(self, nbytes: int) -> torch.Tensor:
        """See `Device.scratch`."""
        buffer = self._scratch.take(nbytes)
        assert buffer is not None  # the pool has no limit
        return buffer

    def trim(self, idle_bytes: int) -> None:
        """See `Device.trim`."""
        self._scratch.trim(idle_bytes)

    def drain(self) -> None:
        """See `Device.drain`."""
        torch.cuda.synchronize(self.device)
        for role in ROLES:
            if role in self._watchers:  # its thread runs callbacks in order
                last = CudaEvent(role)
                last.recorded.record(self._stream(role))
                self.when(last, lambda: None)
                last.settle()

    def give_back(self, scratch: torch.Tensor) -> None:
        """See `Device.give_back`."""
        self._scratch.give_back(scratch)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`: pinned, or pageable (and said so once) if no more can be."""
        if not self._pageable:
            try:
                return torch.empty(nbytes, dtype=torch.uint8, pin_memory=True)
            except RuntimeError as error:
                self._pageable = True
                log.warning(
                    "No more pinned memory (%s): swapping through pageable memory from here on, "
                    "which is slower. A host_limit keeps swapping within what can be pinned.",
                    error,
                )
        try:
            return torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:
            raise MemoryError(str(error)) from error

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return bool(torch.cuda.is_current_stream_capturing())

    def take_damage(self) -> str:
        """See `Device.take_damage`: a kernel that meets a damaged tile cannot raise."""
        bad = gpu.take_damage(self.index)
        return (
            f"a decode on cuda:{self.index} met a damaged tile (number {bad - 1})." if bad else ""
        )

    def has_room(self, nbytes: int) -> bool:
        """See `Device.has_room`."""
        if self._asked % ASK_EVERY == 0:
            self._free_bytes = self._total_bytes - torch.cuda.memory_allocated(self.index)
        self._asked += 1
        return nbytes + self._total_bytes // RESERVE_SHARE <= self._free_bytes

    def staging_full(self) -> bool:
        """See `Device.staging_full`."""
        return self._scratch.in_use_bytes > self.backlog_bytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory, in use and idle."""
        return self._scratch.in_use_bytes + self._scratch.idle_bytes

    def _stream(self, role: Role) -> torch.cuda.Stream:
        own = self._streams.get(role)
        return torch.cuda.current_stream(self.device) if own is None else own

    def _allocate_scratch(self, nbytes: int) -> torch.Tensor:
        # On the codec stream whoever asks: that is the stream that the block belongs to.
        with torch.cuda.stream(self._streams["codec"]):
            return self._with_retry(
                lambda: torch.empty(nbytes, dtype=torch.uint8, device=self.device)
            )

    def _with_retry(self, allocate: Callable[[], torch.Tensor]) -> torch.Tensor:
        # Out of memory: what the pool keeps idle may be what is missing.
        try:
            return allocate()
        except torch.cuda.OutOfMemoryError:
            self._scratch.clear()
            torch.cuda.empty_cache()
        try:
            return allocate()
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def _watcher(self, role: Role) -> _Watcher:
        found = self._watchers.get(role)
        if found is None:
            with self._watchers_lock:
                found = self._watchers.get(role)
                if found is None:
                    found = self._watchers[role] = _Watcher(self.index, role)
        return found


class _Watcher:
    """A thread that waits for the events of one stream, in order, and runs their callbacks."""

    def __init__(self, index: int, role: Role) -> None:
        self._queue: queue.SimpleQueue[tuple[CudaEvent, Callable[[], None]]] = queue.SimpleQueue()
        self._index = index
        name = f"cswap-cuda{index}-{role}"
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, event: CudaEvent, callback: Callable[[], None]) -> None:
        """Run the callback once the event has fired."""
        self._queue.put((event, callback))

    def _run(self) -> None:
        torch.cuda.set_device(self._index)
        while True:
            self._next()

    def _next(self) -> None:  # a frame of its own: nothing of the last callback stays alive
        event, callback = self._queue.get()
        try:
            event.recorded.synchronize()
            callback()
        except BaseException as error:
            log.exception("a callback failed")
            event.error = event.error or without_frames(error)
        finally:
            event.done()


def _event() -> torch.cuda.Event:
    # blocking: a thread that waits sleeps instead of spinning
    return torch.cuda.Event(enable_timing=True, blocking=True)  # type: ignore[no-untyped-call]


@cache
def _origin() -> tuple[torch.cuda.Event, float]:
    # An event, and when it fired by the host's clock.
    event = _event()
    event.record(torch.cuda.current_stream())
    event.synchronize()
    return event, time.perf_counter()


def _own(event: Event) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise InternalError(f"event {event!r} is not of this device")
    return event


def _as_memory_error(error: Exception) -> BaseException:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return MemoryError(str(error))
    return error


@cache
def cuda_device(index: int) -> CudaDevice:
    """The device of that index; engines share it, its streams and its threads."""
    return CudaDevice(index)
