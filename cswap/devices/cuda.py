"""A CUDA device: three streams beside the user's own, and pinned memory on the host."""

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
from cswap.devices.base import FLAT, LinkDevice
from cswap.devices.cuda_events import Moment, cuda_event
from cswap.devices.cuda_memcpy import memcpy_async
from cswap.devices.pinned import pinned, pinned_size
from cswap.log import log

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from cswap.devices.side_streams import SideStreams

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
    part_bytes = 64 << 20

    def __init__(self, index: int) -> None:
        """Args: index: torch's index of the device.

        Raises:
            UnsupportedError: no library copies by address.
        """
        self.index = index
        self.device = torch.device("cuda", index)
        total = torch.cuda.get_device_properties(index).total_memory
        self.backlog_bytes = min(total // BACKLOG_SHARE, BACKLOG_BYTES)
        self._total_bytes = self._free_bytes = total
        self._asked = 0
        self.ready_bytes = total // READY_SHARE
        self._side_streams = CudaStreams(self)
        self._held: deque[tuple[torch.cuda.Event, torch.Tensor]] = deque()
        self._relief: list[weakref.WeakMethod[Callable[[], None]]] = []
        self._pageable = False
        self._counting = threading.Lock()
        self._stalls: deque[tuple[torch.cuda.Event, torch.cuda.Event]] = deque()
        self._joined = 0
        self._stalled_s = 0.0
        self._origin: tuple[torch.cuda.Event, float] | None = None

    # ------------------------------------------------------------------- order

    def now(self) -> Moment:
        """See `Device.now`."""
        stream, event = cuda_streams.current(self.index), cuda_event()
        event.record(stream)
        return Moment(event, stream)

    def join(self, moment: Moment) -> None:
        """See `Device.join`: the stream waits, the host does not."""
        stream = cuda_streams.current(self.index)
        if moment.stream != stream:
            self.stall(stream, moment.event)

    def stall(self, stream: torch.cuda.Stream, event: torch.cuda.Event) -> None:
        """Let a stream of the computation wait; `stalled_s` counts it."""
        self._joined += 1
        if self._joined % TIME_EVERY or self.is_capturing():
            stream.wait_event(event)
            return
        began, ended = cuda_event(timing=True), cuda_event(timing=True)
        began.record(stream)
        stream.wait_event(event)
        ended.record(stream)
        self._stalls.append((began, ended))

    @property
    def stalled_s(self) -> float:
        """See `Device.stalled_s`; estimated from one join in TIME_EVERY."""
        if self.is_capturing():  # which a question to the device would end
            return self._stalled_s
        with self._counting:
            while self._stalls and self._stalls[0][1].query():  # type: ignore[no-untyped-call]
                began, ended = self._stalls.popleft()
                self._stalled_s += TIME_EVERY * began.elapsed_time(ended) / 1e3
            return self._stalled_s

    def origin(self) -> tuple[torch.cuda.Event, float]:
        """See `SideStreams.origin`."""
        if self._origin is None:
            event = cuda_event(timing=True)
            event.record(cuda_streams.current(self.index))
            event.synchronize()
            self._origin = event, time.perf_counter()
        return self._origin

    def side_streams(self) -> SideStreams:
        """See `LinkDevice.side_streams`."""
        return self._side_streams

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

    def drain(self) -> None:
        """See `Device.drain`."""
        torch.cuda.synchronize(self.device)
        self.let_go_held()

    def hold(self, memory: torch.Tensor, after: torch.cuda.Event) -> None:
        """See `LinkDevice.hold`: CuPy's pool gives a block out again at once, whatever uses it."""
        self.let_go_held()
        self._held.append((after, memory))

    def let_go_held(self) -> None:
        """See `LinkDevice.let_go_held`."""
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

    def _make_room(self) -> None:
        # Out of memory: finish everything that is under way, and give back all that can be.
        self.drain()
        for reference in self._relief:
            give_back = reference()
            if give_back is not None:
                give_back()
        torch.cuda.empty_cache()


class CudaStreams:
    """See `SideStreams`."""

    def __init__(self, device: CudaDevice) -> None:
        """Args: device: of the streams."""
        self._device, self.memcpy = device, memcpy_async()
        with torch.cuda.device(device.index):
            # Encodes and decodes are short, and copies wait for them.
            self.codec: Any = torch.cuda.Stream(device.device, priority=-1)  # type: ignore[no-untyped-call]
            self.d2h: Any = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]
            self.h2d: Any = torch.cuda.Stream(device.device)  # type: ignore[no-untyped-call]
        self.current = partial(cuda_streams.current, device.index)
        self.before = partial(cuda_streams.before, device.index)
        self.enter, self.leave = cuda_streams.enter, cuda_streams.leave
        self.is_capturing = cuda_streams.is_capturing
        self.new_event, self.stall, self.origin = cuda_event, device.stall, device.origin

    def prepare_thread(self) -> None:
        """See `SideStreams.prepare_thread`."""
        try:
            torch.cuda.set_device(self._device.index)
        except Exception as error:  # the process is about to end, say
            log.debug("cuda:%d: a thread of our own: %s", self._device.index, error)
        allow_during_capture()

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `SideStreams.allocate`."""
        before = self.before()
        try:
            self.enter(self.codec)  # whose memory it is, whoever asks
            return self._device.allocate((nbytes,), FLAT, dtype=torch.uint8)
        finally:
            self.leave(before)


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


@cache
def cuda_device(index: int) -> CudaDevice:
    """The device of that index; engines share it, and its streams."""
    return CudaDevice(index)
