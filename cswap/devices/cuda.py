"""A CUDA device: three streams beside the user's own, and pinned memory on the host.

Note [order without waiting]
~~~~~~~~~~~~~~~~~~~~~~~~~~~~
A job issues its work when it is submitted; streams wait for events on the device, the host waits
for nothing. Callbacks are due when their event has fired. Whoever calls `pump` runs the due ones:
computing threads do as they pass, at the price of a query, and one thread does for those who do not
pass (the computation may be waiting on the host, or be done). That thread does nothing while others
pass. Else it sleeps until the oldest event has fired, and a little longer, so that it finds several
callbacks due at a time: each time that it wakes it competes with the computing thread for the
interpreter.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from functools import cache, partial
from typing import TYPE_CHECKING, Any, Final

import torch

from cswap import cuda_streams
from cswap.codecs import gpu
from cswap.devices.base import FLAT, Event, LinkDevice, Role
from cswap.devices.cuda_callbacks import COALESCE_S, Callbacks, allow_during_capture
from cswap.devices.cuda_events import CudaEvent, Gone, cuda_event
from cswap.devices.cuda_memcpy import INFERRED, memcpy_async
from cswap.devices.pinned import pinned, pinned_size
from cswap.errors import InternalError, without_frames
from cswap.log import log
from cswap.pool import BufferPool, Loan

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.codecs.base import Stream
    from cswap.devices.side_streams import SideStreams

    Job = Callable[[Stream], None]

ROLES: Final[tuple[Role, ...]] = ("compute", "codec", "d2h", "h2d")

BACKLOG_SHARE: Final = 32
"""Of the device's memory, 1/BACKLOG_SHARE may be on its way out, but no more than BACKLOG_BYTES."""

BACKLOG_BYTES: Final = 1 << 30

READY_SHARE: Final = 16
"""Of the device's memory, 1/READY_SHARE may be decoded ahead of its use, if there is room."""

RESERVE_SHARE: Final = 20
"""Of the device's memory, 1/RESERVE_SHARE stays free of memory that is decoded ahead."""

TIME_EVERY: Final = 8
"""Joins between two whose wait is timed: two more events cost some microseconds."""

ASK_EVERY: Final = 32
"""Questions for room between two looks at the allocator, which take longer than a launch."""


class CudaDevice(LinkDevice):
    """One GPU. Thread-safe: autograd calls unpack from threads of its own."""

    kind = "cuda"
    unified = False
    section_bytes = 64 << 20

    def __init__(self, index: int) -> None:
        """Args: index: torch's index of the device."""
        self.index = index
        self.device = torch.device("cuda", index)
        total = torch.cuda.get_device_properties(index).total_memory
        self.backlog_bytes = min(total // BACKLOG_SHARE, BACKLOG_BYTES)
        self._total_bytes = self._free_bytes = total
        self._asked = 0
        self.ready_bytes = total // READY_SHARE
        with torch.cuda.device(index):
            # Encodes and decodes are short, and copies wait for them.
            self._streams: dict[str, torch.cuda.Stream] = {
                role: torch.cuda.Stream(self.device, priority=-1 if role == "codec" else 0)  # type: ignore[no-untyped-call]
                for role in ROLES[1:]
            }
        self._events: dict[int, deque[Any]] = {}  # of Gone
        self._scratch = BufferPool(
            self._allocate_scratch, enough_bytes=self.backlog_bytes, discard=self._discard
        )
        self._here = threading.local()
        self._callbacks = Callbacks(index)
        self._held: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._relief: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._pageable = False
        self._joined = 0
        self._stalled_s = 0.0
        self._origin: tuple[torch.cuda.Event, float] | None = None

    # -------------------------------------------------------------- jobs, order

    def submit(
        self, job: Job, *, role: Role, after: tuple[Event, ...] = (), measure: bool = False
    ) -> Event:
        """See `LinkDevice.submit`. The job only issues work, on the thread that submits it."""
        stream = self._streams.get(role)
        if stream is None:
            return self._issue(job, cuda_streams.current(self.index), after, measure)
        before = cuda_streams.before(self.index)
        try:
            cuda_streams.enter(stream)
            return self._issue(job, stream, after, measure)
        finally:
            cuda_streams.leave(before)

    def _issue(self, job: Job, stream: Any, after: tuple[Event, ...], measure: bool) -> CudaEvent:
        # stream: torch's, which is a codec's `Stream`, too. A cast would be a call for each job.
        event = self._new_event(stream, timing=measure)
        for earlier in after:
            own = earlier if isinstance(earlier, CudaEvent) else _own(earlier)
            if own.stream != stream:  # a stream is in order by itself
                stream.wait_event(own.recorded)
        if measure:
            event.start()
        try:
            job(stream)
        except Exception as error:
            # Its frames hold the job's tensors, and the event outlives them.
            event.error = _as_memory_error(without_frames(error))
        event.recorded.record(stream)
        return event

    def copy(
        self,
        target: torch.Tensor,
        source: torch.Tensor,
        nbytes: int,
        *,
        role: Role,
        after: tuple[Event, ...],
    ) -> Event:
        """See `LinkDevice.copy`."""
        memcpy = memcpy_async()
        if memcpy is None:
            target, source = target.view(-1), source.view(-1)
            return super().copy(target, source, nbytes, role=role, after=after)
        stream = self._streams[role]
        event = self._new_event(stream)
        for earlier in after:  # as above: a function would be a call for each job
            own = earlier if isinstance(earlier, CudaEvent) else _own(earlier)
            if own.stream != stream:
                stream.wait_event(own.recorded)
        try:
            memcpy(target.data_ptr(), source.data_ptr(), nbytes, INFERRED, stream.cuda_stream)
        except Exception as error:
            event.error = without_frames(error)
        event.recorded.record(stream)
        return event

    def when(self, event: Event, callback: Callable[[], None]) -> None:
        """See `LinkDevice.when`."""
        self._callbacks.add(_own(event), callback)

    def pump(self) -> None:
        """See `Device.pump`."""
        self._callbacks.run_due()

    def wait(self, event: Event) -> None:
        """See `LinkDevice.wait`."""
        own = _own(event)
        own.recorded.synchronize()
        while own.pending > 0:
            self._callbacks.run_due()
            if own.pending > 0:  # another thread runs them
                time.sleep(COALESCE_S / 4)

    def now(self) -> Event:
        """See `Device.now`."""
        stream = cuda_streams.current(self.index)
        event = self._new_event(stream)
        event.recorded.record(stream)
        return event

    def join(self, event: Event, at: Event | None = None) -> None:
        """See `Device.join`: the stream waits, the host does not."""
        own = event if isinstance(event, CudaEvent) else _own(event)
        if at is None:
            stream = cuda_streams.current(self.index)
        else:
            stream = at.stream if isinstance(at, CudaEvent) else _own(at).stream
        if own.stream != stream:
            self.stall(stream, own.recorded)

    def stall(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let a stream of the computation wait; `stalled_s` counts it."""
        self._joined += 1
        if self._joined % TIME_EVERY or self.is_capturing():
            stream.wait_event(event)
            return
        timed = self._new_event(stream, timing=True)
        timed.start()
        stream.wait_event(event)
        timed.recorded.record(stream)
        self.when(timed, lambda: self._add_stall(TIME_EVERY * timed.elapsed_s))

    @property
    def stalled_s(self) -> float:
        """See `Device.stalled_s`; estimated from one join in TIME_EVERY."""
        return self._stalled_s

    def _add_stall(self, seconds: float) -> None:
        self._stalled_s += seconds  # callbacks run one at a time

    @property
    def origin(self) -> tuple[torch.cuda.Event, float]:
        """An event of this device, and when it fired by the host's clock."""
        if self._origin is None:
            event = cuda_event(timing=True)
            event.record(cuda_streams.current(self.index))
            event.synchronize()
            self._origin = event, time.perf_counter()
        return self._origin

    def _new_event(self, stream: torch.cuda.Stream, *, timing: bool = False) -> CudaEvent:
        # See Note [events are used again].
        if timing:
            return CudaEvent(self, cuda_event(timing=True), stream)
        used = self._events.get(stream.cuda_stream)
        if used is None:
            used = self._events.setdefault(stream.cuda_stream, deque())
        try:
            recorded = used.popleft().recorded
        except (IndexError, AttributeError):  # there is none, or one without an event
            recorded = cuda_event()
        event = CudaEvent(self, recorded, stream)
        event.gone = gone = Gone(event, used.append)
        gone.recorded = recorded
        return event

    def side_streams(self) -> SideStreams | None:
        """See `LinkDevice.side_streams`; they need CuPy's copies."""
        memcpy = memcpy_async()
        return None if memcpy is None else CudaStreams(self, self._streams, memcpy)

    # ------------------------------------------------------------------- memory

    def allocate(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Device.allocate`: of the current stream's memory."""
        try:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=self.device)
        except torch.cuda.OutOfMemoryError:
            self._make_room()
        try:
            return torch.empty_strided(sizes, strides, dtype=dtype, device=self.device)
        except torch.cuda.OutOfMemoryError as error:
            raise MemoryError(str(error)) from None

    def share(self, memory: torch.Tensor) -> None:
        """See `Device.share`; nothing happens on the stream that the memory is of."""
        memory.record_stream(cuda_streams.current(self.index))

    def scratch(self, nbytes: int, role: Role) -> torch.Tensor:
        """See `Device.scratch`."""
        self._here.fresh = False
        loan = self._scratch.take(nbytes)
        assert loan is not None  # the pool has no limit
        stream = self._streams[role]
        if loan.after is not None:
            stream.wait_event(_own(loan.after).recorded)
        elif self._here.fresh and role != "codec":
            # A block of the codec stream's memory: its earlier kernels may still use it.
            codec = self._streams["codec"]
            event = self._new_event(codec)
            event.recorded.record(codec)
            stream.wait_event(event.recorded)
        return loan.buffer

    def give_back(self, scratch: torch.Tensor, after: Event | None = None) -> None:
        """See `Device.give_back`."""
        try:
            self._scratch.give_back(scratch, after)
        except BaseException:  # an interrupt: a stream may still use it, and nobody would wait
            torch.cuda.synchronize(self.device)
            raise

    def trim(self, idle_bytes: int) -> None:
        """See `Device.trim`."""
        self._let_go_held()
        self._scratch.trim(idle_bytes)

    def drain(self) -> None:
        """See `Device.drain`."""
        torch.cuda.synchronize(self.device)
        self._callbacks.run_all()
        self._let_go_held()

    def hold(self, memory: torch.Tensor, after: Event) -> None:
        """See `Device.hold`: CuPy's pool gives a block out again at once, whatever uses it."""
        self._let_go_held()
        self._held.append((_own(after).recorded, memory))

    def _let_go_held(self) -> None:
        try:
            while self._held and self._held[0][0].query():  # type: ignore[no-untyped-call]
                self._held.popleft()
        except IndexError:  # another thread was faster
            pass

    def relieve_by(self, give_back: Callable[[], None]) -> None:
        """When memory is short, call this bound method; it is held weakly."""
        self._relief.append(weakref.WeakMethod(give_back))

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`: pinned, or pageable (and said so once) if no more can be."""
        if not self._pageable:
            try:
                with torch.cuda.device(self.index):  # on threads of our own it is another one
                    return pinned(nbytes)
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

    host_size = staticmethod(pinned_size)

    def is_capturing(self) -> bool:
        """See `Device.is_capturing`."""
        return cuda_streams.is_capturing()

    def damage(self) -> Sequence[str]:
        """See `Device.damage`: a kernel that meets a damaged tile cannot raise."""
        tiles = gpu.damage(self.index)
        if not tiles:  # as nearly always, and asked for each tensor
            return ()
        return [f"a decode on cuda:{self.index} met a damaged tile (number {t})." for t in tiles]

    def has_room(self, nbytes: int) -> bool:
        """See `LinkDevice.has_room`."""
        if self._asked % ASK_EVERY == 0:
            self._free_bytes = self._total_bytes - self.allocated_bytes()
        self._asked += 1
        return nbytes + self._total_bytes // RESERVE_SHARE <= self._free_bytes

    def allocated_bytes(self) -> int:
        """See `Device.allocated_bytes`: as torch's allocator counts."""
        return int(torch.cuda.memory_allocated(self.index))

    def scratch_in_use_bytes(self) -> int:
        """See `LinkDevice.scratch_in_use_bytes`."""
        return self._scratch.in_use_bytes

    def bound_scratch(self, nbytes: int) -> None:
        """See `LinkDevice.bound_scratch`; of several engines, the last one is heard."""
        self._scratch.enough_bytes = nbytes

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory, in use and idle."""
        return self._scratch.in_use_bytes + self._scratch.idle_bytes

    def _allocate_scratch(self, nbytes: int) -> torch.Tensor:
        # On the codec stream whoever asks: that is the stream that the block belongs to.
        self._here.fresh = True
        before = cuda_streams.before(self.index)
        try:
            cuda_streams.enter(self._streams["codec"])
            return self.allocate((nbytes,), FLAT, dtype=torch.uint8)
        finally:
            cuda_streams.leave(before)

    def _discard(self, loan: Loan) -> None:
        # Its memory goes back to the codec stream, which has to wait for its last user.
        if loan.after is not None:
            self._streams["codec"].wait_event(_own(loan.after).recorded)

    def _make_room(self) -> None:
        # Out of memory: finish everything that is under way, and give back all that can be.
        self.drain()
        for reference in self._relief:
            give_back = reference()
            if give_back is not None:
                give_back()
        self._scratch.clear()
        torch.cuda.empty_cache()


class CudaStreams:
    """See `SideStreams`."""

    def __init__(
        self, device: CudaDevice, streams: dict[str, torch.cuda.Stream], memcpy: Callable[..., Any]
    ) -> None:
        """Args: device: of the streams; memcpy: see `SideStreams`."""
        self._device, self.memcpy = device, memcpy
        self.codec, self.d2h, self.h2d = (streams[role] for role in ROLES[1:])
        self.current = partial(cuda_streams.current, device.index)
        self.before = partial(cuda_streams.before, device.index)
        self.enter, self.leave = cuda_streams.enter, cuda_streams.leave
        self.is_capturing = cuda_streams.is_capturing
        self.new_event, self.stall = cuda_event, device.stall

    def prepare_thread(self) -> None:
        """See `SideStreams.prepare_thread`."""
        try:
            torch.cuda.set_device(self._device.index)
        except Exception as error:  # the process is about to end, say
            log.debug("cuda:%d: a thread of our own: %s", self._device.index, error)
        allow_during_capture()

    def wait(self, stream: torch.cuda.Stream, event: object) -> None:
        """See `SideStreams.wait`."""
        stream.wait_event(_own(event).recorded)

    def point(self, event: torch.cuda.Event, stream: torch.cuda.Stream) -> CudaEvent:
        """See `SideStreams.point`."""
        return CudaEvent(self._device, event, stream)

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `SideStreams.allocate`."""
        return self._device._allocate_scratch(nbytes)  # noqa: SLF001


def _own(event: object) -> CudaEvent:
    if not isinstance(event, CudaEvent):
        raise InternalError(f"event {event!r} is not of this device")
    return event


def _as_memory_error(error: Exception) -> BaseException:
    if isinstance(error, torch.cuda.OutOfMemoryError):
        return MemoryError(str(error))
    return error


@cache
def cuda_device(index: int) -> CudaDevice:
    """The device of that index; engines share it, its streams and its thread."""
    return CudaDevice(index)
