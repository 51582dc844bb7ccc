"""`ClockedCuda`: the stand-in for `torch.cuda` whose streams, events and memory have times.

Note [two clocks]
~~~~~~~~~~~~~~~~~
The host has a moment, `ClockedCuda.now_s`; each stream has the moment at which its work is done.
Work begins when it is issued, when its stream is free, and when the events that the stream waits
for have fired; all that is known at the time of issue, so nothing is scheduled later. The host's
moment goes on by counted costs (`cost`), and where it waits for an event. While it waits, callbacks
run as their events fire: a GPU's process has a thread for that.

A kernel of a codec beside the computation delays work of the compute stream that is issued later.
"""

from __future__ import annotations

import heapq
import math
from collections import Counter, deque
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from bench.twin.lagging_cuda import (
    LaggingCuda,
    LaggingEvent,
    LaggingStream,
    LateSize,
    memory_at,
)
from bench.twin.profiles import LINE_BYTES

if TYPE_CHECKING:
    from bench.twin.profiles import Profile


class Span(NamedTuple):
    """A piece of work of a stream, for the picture of a step."""

    stream: str
    name: str
    began_s: float
    ended_s: float


class ClockedStream(LaggingStream):
    """A stream that has times.

    Attributes:
        free_s: when all work issued so far is done.
        busy_s: seconds of that work.
    """

    def __init__(self, cuda: ClockedCuda, name: str) -> None:
        self._ends: deque[float] = deque()
        self._done = 0
        self.free_s = self.busy_s = 0.0
        super().__init__(cuda, name)
        self.clocked = cuda

    @property
    def done(self) -> int:
        """Number of pieces that have run at the host's moment."""
        while self._ends and self._ends[0] <= self.clocked.now_s:
            self._ends.popleft()
            self._done += 1
        return self._done

    @done.setter
    def done(self, _value: int) -> None:
        """The clock says it."""

    def issue(self) -> int:
        """See `LaggingStream.issue`; the piece takes no time."""
        self.free_s = max(self.free_s, self.clocked.now_s)
        self._ends.append(self.free_s)
        return super().issue()

    def work(self, seconds: float, name: str) -> None:
        """Issue work that takes so long."""
        began_s = max(self.free_s, self.clocked.now_s)
        self.free_s = began_s + seconds
        self.busy_s += seconds
        self.issue()
        if self.clocked.spans is not None:
            self.clocked.spans.append(Span(self.name, name, began_s, self.free_s))

    def delay(self, seconds: float) -> None:
        """Issue nothing, but be free later: another stream takes the device's time."""
        if self.free_s > self.clocked.now_s:
            self.free_s += seconds

    def wait_event(self, event: LaggingEvent) -> None:
        """See `LaggingStream.wait_event`."""
        self.clocked.cost("cuda")
        assert isinstance(event, ClockedEvent)
        self.free_s = max(self.free_s, event.at_s)
        super().wait_event(event)

    def wait_stream(self, other: ClockedStream) -> None:
        """See `torch.cuda.Stream.wait_stream`."""
        event = ClockedEvent(self.clocked)
        event.record(other)
        self.wait_event(event)


class ClockedEvent(LaggingEvent):
    """An event that knows when it fires: ``at_s``."""

    def __init__(self, cuda: ClockedCuda) -> None:
        super().__init__(cuda)
        self.clocked, self.at_s = cuda, 0.0

    def record(self, stream: LaggingStream | None = None) -> None:
        """See `LaggingEvent.record`."""
        self.clocked.cost("cuda")
        on = self.clocked.current_stream() if stream is None else stream
        super().record(on)
        assert isinstance(on, ClockedStream)
        self.at_s = on.free_s

    def query(self) -> bool:
        """See `LaggingEvent.query`."""
        self.clocked.cost("cuda")
        return super().query()

    def synchronize(self) -> None:
        """See `LaggingEvent.synchronize`."""
        self.clocked.waits += 1
        self.clocked.wait_until(self.at_s)
        assert super().query()

    def elapsed_time(self, end: LaggingEvent) -> float:
        """Milliseconds between two events."""
        assert isinstance(end, ClockedEvent)
        return 1e3 * (end.at_s - self.at_s)


class ClockedCuda(LaggingCuda):
    """See the top.

    Attributes:
        profile: the machine.
        now_s: the host's moment.
        waited_s: seconds that the host has waited for the device.
        counts: number of the host's calls, by kind.
        step_peak_bytes: most bytes since a caller set it to 0; a goal resets ``peak_bytes``.
        counting: whether the host's calls take time.
        in_operator: below autograd, where no callback may run: a tensor that is detached there
            counts no versions.
        link_s: seconds of the link's copies, by direction.
        spans: work of all streams while a step is drawn; else None.
        engine_device: of the engine that was measured on an H200, whose callbacks run while the
            host waits; None: the engine has none.
    """

    stream_type, event_type = ClockedStream, ClockedEvent

    def __init__(self, profile: Profile) -> None:
        """Args: profile: of the machine."""
        self.profile = profile
        self.now_s = self.waited_s = 0.0
        self.step_peak_bytes = 0
        self.counts: dict[str, int] = {}
        self.counting = self.in_operator = False
        self.spans: list[Span] | None = None
        self.engine_device: Any = None
        self._costs = {
            "operator": profile.host.operator_s,
            "view": profile.host.view_s,
            "detach": profile.host.detach_s,
            "python": profile.host.python_s,
            "cuda": profile.host.cuda_s,
            "launch": profile.host.launch_s,
        }
        self.link_s = {"out": 0.0, "back": 0.0}
        self._link = {True: 0.0, False: 0.0}  # when each direction is free, by whether it is out
        self._makers: dict[int, str] = {}
        self._pinned: Counter[int] = Counter()  # free blocks of the host, by bytes
        self._later: list[tuple[float, int]] = []  # when bytes are free, and how many
        super().__init__(total_bytes=profile.device_bytes)
        self.peak_bytes = 0

    # ------------------------------------------------------------------- times

    def cost(self, kind: str) -> None:
        """The host has made a call of this kind."""
        if self.counting:
            self.counts[kind] = self.counts.get(kind, 0) + 1
            self.now_s += self._costs[kind]

    def wait_until(self, at_s: float) -> None:
        """Block the host; callbacks run meanwhile."""
        while self.engine_device is not None and not self.in_operator:
            due_s = self._next_due_s()
            if due_s > at_s or due_s == math.inf:
                break
            self._idle_until(due_s + self.profile.host.wake_s)
            self.engine_device.pump()
        self._idle_until(at_s)

    def runs_callbacks_of(self, device: Any) -> None:
        """See ``engine_device``. Args: device: the engine's."""
        self.engine_device = device if hasattr(device, "_callbacks") else None

    def _next_due_s(self) -> float:
        due = self.engine_device._callbacks._due  # noqa: SLF001
        return min((d[0][0].recorded.at_s for d in due.values() if d), default=math.inf)

    def _idle_until(self, at_s: float) -> None:
        if at_s > self.now_s:
            self.waited_s += at_s - self.now_s
            self.now_s = at_s

    def synchronize(self, _device: object = None) -> None:
        """See `torch.cuda.synchronize`."""
        while (last_s := max(s.free_s for s in self._clocked())) > self.now_s:
            self.wait_until(last_s)
        self.seen.update((stream, stream.issued) for stream in self.streams)

    def busy_s(self) -> dict[str, float]:
        """Seconds of the work issued so far, by stream."""
        return {s.name: s.busy_s for s in self._clocked()}

    def _clocked(self) -> list[ClockedStream]:
        return [s for s in self.streams if isinstance(s, ClockedStream)]

    # ------------------------------------------------------------------- copies

    def copy(self, nbytes: int, stream: ClockedStream, *, out: bool) -> None:
        """Issue a copy over the link."""
        p = self.profile
        rate = p.out if out else p.back
        began_s = max(stream.free_s, self.now_s)
        seconds = nbytes / rate
        beside_s = min(max(self._link[not out] - began_s, 0.0), seconds * rate / p.both)
        seconds += beside_s * (1 - p.both / rate)
        stream.work(p.copy_s + seconds, "copy out" if out else "copy back")
        self._link[out] = stream.free_s
        self.link_s["out" if out else "back"] += p.copy_s + seconds

    # ------------------------------------------------------------------- memory

    def empty(self, *sizes: Any, **options: Any) -> torch.Tensor:
        """See `LaggingCuda.empty`."""
        found = super().empty(*sizes, **options)
        self.step_peak_bytes = max(self.step_peak_bytes, self.allocated_bytes)
        return found

    def rounded(self, nbytes: int) -> int:
        """Bytes of the allocator's block."""
        return -(-max(nbytes, 1) // LINE_BYTES) * LINE_BYTES

    def freed(self, nbytes: int, recorded: set[LaggingStream]) -> None:
        """See `LaggingCuda.freed`: a block that other streams use is free when they have run."""
        at_s = max((s.free_s for s in recorded if isinstance(s, ClockedStream)), default=0.0)
        if at_s > self.now_s:
            heapq.heappush(self._later, (at_s, nbytes))
        else:
            self.allocated_bytes -= nbytes

    def host_freed(self, nbytes: int) -> None:
        """See `LaggingCuda.host_freed`: CuPy's pool keeps pinned blocks."""
        self._pinned[nbytes] += 1

    def pinned(self, nbytes: int) -> torch.Tensor:
        """[nbytes] uint8 of pinned host memory; the host pins it where its pool has none."""
        if self._pinned[nbytes]:
            self._pinned[nbytes] -= 1
        elif self.counting:
            self.now_s += nbytes / self.profile.host.pin_bytes_per_s
        return self.empty(nbytes, dtype=torch.uint8)

    def process_events(self, wanted: int) -> None:
        """See `LaggingCuda.process_events`: blocks are free whose streams have run.

        Raises:
            OutOfMemoryError: the device has not so much memory.
        """
        while self._later and self._later[0][0] <= self.now_s:
            self.allocated_bytes -= heapq.heappop(self._later)[1]
        if self.allocated_bytes + wanted > self.profile.device_bytes:
            raise self.OutOfMemoryError(f"out of memory: {wanted} bytes")

    def max_memory_allocated(self, _device: object = None) -> int:
        """See `torch.cuda.max_memory_allocated`."""
        return self.peak_bytes

    def reset_peak_memory_stats(self, _device: object = None) -> None:
        """See `torch.cuda.reset_peak_memory_stats`."""
        self.peak_bytes = self.allocated_bytes

    def mem_get_info(self, _device: object = None) -> tuple[int, int]:
        """See `torch.cuda.mem_get_info`."""
        return self.profile.device_bytes - self.allocated_bytes, self.profile.device_bytes

    def memory_reserved(self, _device: object = None) -> int:
        """See `torch.cuda.memory_reserved`: nothing is cached."""
        return self.allocated_bytes

    def maker(self, tensor: torch.Tensor) -> str:
        """The operator that wrote a tensor's memory last."""
        block = self._find(tensor)
        return "" if block is None else self._makers.get(block.start, "")

    def note_maker(self, tensor: torch.Tensor, name: str) -> None:
        """An operator has written a tensor's memory."""
        block = self._find(tensor)
        if block is not None:
            self._makers[block.start] = name

    @property
    def compute(self) -> ClockedStream:
        """The stream of the user's operators."""
        assert isinstance(self.default, ClockedStream)
        return self.default

    def spin(self, seconds: float) -> None:
        """See `cswap.cuda_streams.spin`."""
        self.cost("cuda")
        self.stream_now().work(seconds, "spin")

    def stream_now(self) -> ClockedStream:
        """The current stream."""
        found = self.current_stream()
        assert isinstance(found, ClockedStream)
        return found

    def late_size(self, nbytes: int) -> LateSize:
        """The size of an encoding, known when the work issued so far has run."""
        return LateSize(self, nbytes)

    def copy_at(self, target: int, source: int, nbytes: int) -> None:
        """Issue a copy between these addresses on the current stream."""
        of, to = memory_at(source, nbytes), memory_at(target, nbytes)
        self.touch(of, writes=False, text="copy")
        self.touch(to, writes=True, text="copy")
        self.copy(nbytes, self.stream_now(), out=self.is_device(of))

    def is_device(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor is of device memory."""
        block = self._find(tensor)
        return block is not None and block.stream is not None
