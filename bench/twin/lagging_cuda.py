"""A stand-in for `torch.cuda` whose device lags behind the host. It checks every memory access.

Streams queue the work that is issued on them. The work runs when the test lets it run, or when the
host waits. Values change at the time of issue, so the stand-in does not reproduce the order of the
device; it checks the order:

* If two streams access the same memory and one of them writes, events must order the two accesses
  (vector clocks). If all accesses are ordered, every order that the device may choose gives the
  same values as the order of the host.
* Memory behaves as with torch's caching allocator. A block belongs to the stream that it was
  allocated on. When its last reference is gone, the next allocation on that stream may take it. If
  another stream has accessed the block and was not joined, this is a fault, unless `record_stream`
  named the stream. A fresh block counts as written by its own stream: a write on another stream
  must wait for it.

Tensors of this device are tensors of torch's device "cpu".
"""

from __future__ import annotations

import ctypes
import random
import threading
import types
import weakref
from bisect import bisect_left, bisect_right, insort
from collections import defaultdict
from dataclasses import dataclass, field
from math import prod
from typing import Any, Final

import numpy as np
import torch

Clock = dict["LaggingStream", int]
"""For each stream, the number of its pieces of work that lie before a point."""

TOTAL_BYTES: Final = 64 << 20


def _merge(into: Clock, other: Clock) -> None:
    for stream, n in other.items():
        if into.get(stream, 0) < n:
            into[stream] = n


class LaggingStream:
    """One stream, which counts issued and finished pieces of work.

    Attributes:
        threads: number of threads of the CPU's codec, which stands for the GPU's.
        clock: the work that comes before the piece that is issued next.
    """

    threads = 1

    def __init__(self, cuda: LaggingCuda, name: str) -> None:
        """Args: cuda: the stand-in of the stream; name: name for messages."""
        self._cuda, self.name = cuda, name
        self.cuda_stream = id(self)
        self.clock: Clock = {}
        self.issued = self.done = 0
        self._waits: dict[int, tuple[LaggingStream, int]] = {}
        cuda.streams.append(self)

    def issue(self) -> int:
        """Add a piece of work; return its number."""
        _merge(self.clock, self._cuda.seen)
        self.issued += 1
        self.clock[self] = self.issued
        return self.issued

    def wait_event(self, event: LaggingEvent) -> None:
        """Make all work that is issued from now on wait for the event."""
        stream, number, clock = event.point
        self._waits[self.issue()] = stream, number
        _merge(self.clock, clock)

    @property
    def may_run(self) -> bool:
        """Whether the next piece of work can run now."""
        if self.done == self.issued:
            return False
        wait = self._waits.get(self.done + 1)
        return wait is None or wait[0].done >= wait[1]

    def run_one(self) -> None:
        """Run the next piece of work."""
        self.done += 1
        self._waits.pop(self.done, None)

    def synchronize(self) -> None:
        """Block the host until all issued work has run."""
        event = self._cuda.event_type(self._cuda)
        event.record(self)
        event.synchronize()

    def __repr__(self) -> str:
        return f"<stream {self.name}>"


class LaggingEvent:
    """See `torch.cuda.Event`."""

    def __init__(self, cuda: LaggingCuda) -> None:
        """Args: cuda: the stand-in of the event."""
        self._cuda = cuda
        self.point: tuple[LaggingStream, int, Clock] = cuda.default, 0, {}
        self.at = 0

    def record(self, stream: LaggingStream) -> None:
        """Record the event: it fires when the stream has run all work issued so far."""
        number = stream.issue()
        self.point = stream, number, dict(stream.clock)
        self.at = sum(each.issued for each in self._cuda.streams)

    def query(self) -> bool:
        """Whether the event has fired. If so, the host knows that all earlier work has run."""
        stream, number, clock = self.point
        if stream.done < number:
            return False
        _merge(self._cuda.seen, clock)
        return True

    def synchronize(self) -> None:
        """Block the host until the event has fired; the device runs meanwhile."""
        self._cuda.waits += 1
        while not self.query():
            self._cuda.run_some()

    def elapsed_time(self, end: LaggingEvent) -> float:
        """Milliseconds: 2, and a little more for each piece of work that was issued in between."""
        return 2 + (end.at - self.at) / (1 << 20)


@dataclass(frozen=True, slots=True)
class _Access:
    stream: LaggingStream
    number: int
    start: int
    stop: int
    writes: bool
    text: str


@dataclass(slots=True, eq=False)
class _Block:
    """One allocated block of memory."""

    start: int
    memory: np.ndarray[Any, np.dtype[np.uint8]]
    stream: LaggingStream | None  # None: host memory
    accesses: list[_Access] = field(default_factory=list)
    recorded: set[LaggingStream] = field(default_factory=set)


class LaggingCuda:
    """Stands for `torch.cuda`.

    Attributes:
        faults: texts on the faults found; a test asserts that there are none.
        allocated_bytes: bytes of device memory with a live reference.
        peak_bytes: maximum of ``allocated_bytes``.
        waits: number of times that the host has waited for the device.
        failures: numbers of the future allocations that fail.
        seen: the work of which the host knows that it has run.
    """

    OutOfMemoryError = torch.cuda.OutOfMemoryError
    stream_type: type[LaggingStream] = LaggingStream
    event_type: type[LaggingEvent] = LaggingEvent

    def __init__(self, seed: int = 0, total_bytes: int = TOTAL_BYTES) -> None:
        """Args: seed: seed of the order in which streams run; total_bytes: device memory."""
        self._random = random.Random(seed)
        self._total_bytes = total_bytes
        self._blocks: dict[int, _Block] = {}
        self._starts: list[int] = []
        self._free: dict[tuple[LaggingStream, int], list[Any]] = defaultdict(list)
        self._current = threading.local()
        self.streams: list[LaggingStream] = []
        self.seen: Clock = {}
        self.default = self.stream_type(self, "compute")
        self.faults: list[str] = []
        self.failures: list[int] = []
        self.allocated_bytes = self.peak_bytes = self.waits = self.emptied = 0
        self.capturing = False

    # ------------------------------------------------------- as torch.cuda has it

    def Stream(self, _device: object = None, priority: int = 0) -> LaggingStream:  # noqa: N802
        """See `torch.cuda.Stream`."""
        return self.stream_type(self, f"side{len(self.streams)}/{priority}")

    def Event(self, **_options: bool) -> LaggingEvent:  # noqa: N802
        """See `torch.cuda.Event`."""
        return self.event_type(self)

    def get_device_properties(self, _index: int) -> types.SimpleNamespace:
        """See `torch.cuda.get_device_properties`."""
        return types.SimpleNamespace(
            total_memory=self._total_bytes, major=9, minor=0, multi_processor_count=132
        )

    def device(self, _index: int) -> _On:
        """See `torch.cuda.device`."""
        return _On(self._stack(), self.current_stream())

    def stream(self, stream: LaggingStream) -> _On:
        """See `torch.cuda.stream`."""
        return _On(self._stack(), stream)

    def current_stream(self, _device: object = None) -> LaggingStream:
        """See `torch.cuda.current_stream`."""
        stack = self._stack()
        return stack[-1] if stack else self.default

    def set_device(self, _index: int) -> None:
        """See `torch.cuda.set_device`."""

    def spin(self, _seconds: float) -> None:
        """See `cswap.cuda_streams.spin`; here the host is always ahead."""

    def is_current_stream_capturing(self) -> bool:
        """See `torch.cuda.is_current_stream_capturing`."""
        return self.capturing

    def memory_allocated(self, _index: int) -> int:
        """See `torch.cuda.memory_allocated`."""
        return self.allocated_bytes

    def empty_cache(self) -> None:
        """See `torch.cuda.empty_cache`."""
        self.emptied += 1
        self._free.clear()

    def synchronize(self, _device: object = None) -> None:
        """See `torch.cuda.synchronize`."""
        for stream in list(self.streams):
            stream.synchronize()

    def _stack(self) -> list[LaggingStream]:
        if not hasattr(self._current, "stack"):
            self._current.stack = []
        found: list[LaggingStream] = self._current.stack
        return found

    # ------------------------------------------------------------------- running

    def run_some(self, most: int = 1) -> None:
        """Run pieces of work, each from a random stream that can run.

        Raises:
            AssertionError: all streams wait for each other.
        """
        for _ in range(most):
            able = [s for s in self.streams if s.may_run]
            if not able:
                assert all(s.done == s.issued for s in self.streams), "deadlock on the device"
                return
            self._random.choice(able).run_one()

    # -------------------------------------------------------------------- memory

    def empty(
        self,
        *sizes: Any,
        dtype: torch.dtype = torch.float32,
        device: object = None,
        **_options: Any,
    ) -> torch.Tensor:
        """See `torch.empty`: device memory of the current stream; host memory without a device."""
        shape = torch.Size(sizes[0] if isinstance(sizes[0], tuple) else sizes)
        nbytes = shape.numel() * dtype.itemsize
        if device is None:
            return self._hand_out(np.empty(max(nbytes, 1), np.uint8), nbytes, None).view(dtype)
        if self.failures:
            self.failures = [n - 1 for n in self.failures]
            if self.failures[0] < 0:
                self.failures.pop(0)
                raise torch.cuda.OutOfMemoryError("out of memory")
        stream = self.current_stream()
        stream.issue()
        free = self._free[stream, nbytes]
        memory = free.pop() if free else np.empty(nbytes + 64, np.uint8)
        self.process_events(self.rounded(nbytes))
        self.allocated_bytes += self.rounded(nbytes)
        self.peak_bytes = max(self.peak_bytes, self.allocated_bytes)
        found = self._hand_out(memory, nbytes, stream).view(dtype)
        if len(shape) != 1:
            found = found.view(shape)
        self.touch(found, writes=True, text="allocation")
        return found

    def empty_strided(
        self,
        sizes: tuple[int, ...],
        strides: tuple[int, ...],
        *,
        dtype: torch.dtype,
        device: object,
    ) -> torch.Tensor:
        """See `torch.empty_strided`: device memory of the current stream, without gaps."""
        flat = self.empty(prod(sizes), dtype=dtype, device=device)
        return flat if len(sizes) == 1 else flat.as_strided(sizes, strides)

    def _hand_out(self, memory: Any, nbytes: int, stream: LaggingStream | None) -> torch.Tensor:
        skip = -memory.ctypes.data % 64 if stream is not None else 0
        seen = memory[skip : skip + nbytes]  # torch refers to this view; the block to the array
        block = _Block(memory.ctypes.data, memory, stream)
        self._blocks[block.start] = block
        insort(self._starts, block.start)
        weakref.finalize(seen, self._let_go, block, nbytes)
        return torch.from_numpy(seen)

    def _let_go(self, block: _Block, nbytes: int) -> None:
        del self._blocks[block.start]
        del self._starts[bisect_left(self._starts, block.start)]
        if block.stream is None:
            self.host_freed(nbytes)
            return
        # The allocator also waits for all work issued so far on the recorded streams.
        for stream in (block.stream, *block.recorded):
            _merge(stream.clock, self.seen)
        waited = {block.stream, *block.recorded}
        for access in block.accesses:
            self._check(access, waited, "reuse after a free")
        self.freed(self.rounded(nbytes), block.recorded - {block.stream})
        if not block.recorded - {block.stream}:
            self._free[block.stream, nbytes].append(block.memory)

    def rounded(self, nbytes: int) -> int:
        """Bytes of the block for so many."""
        return nbytes

    def freed(self, nbytes: int, recorded: set[LaggingStream]) -> None:
        """A block has no reference any more. Args: recorded: other streams that use it."""
        self.allocated_bytes -= nbytes

    def host_freed(self, nbytes: int) -> None:
        """A block of host memory has no reference any more."""

    def process_events(self, wanted: int) -> None:
        """So many bytes are to be allocated: look which streams have run."""

    def record_stream(self, tensor: torch.Tensor, stream: LaggingStream) -> None:
        """See `torch.Tensor.record_stream`."""
        block = self._find(tensor)
        if block is not None:
            block.recorded.add(stream)

    def touch(self, tensor: torch.Tensor, *, writes: bool, text: str) -> None:
        """Note that the work being issued on the current stream accesses this memory."""
        block = self._find(tensor)
        if block is None or not tensor.numel():
            return
        stream = self.current_stream()
        start = tensor.data_ptr()
        access = _Access(stream, stream.issue(), start, start + tensor.nbytes, writes, text)
        for earlier in block.accesses:
            overlaps = earlier.start < access.stop and access.start < earlier.stop
            if overlaps and (earlier.writes or writes):
                self._check(earlier, {stream}, text)
        block.accesses = [a for a in block.accesses if not self._covers(access, a)]
        block.accesses.append(access)

    def _check(self, earlier: _Access, waited: set[LaggingStream], text: str) -> None:
        stream = earlier.stream
        if stream in waited or any(w.clock.get(stream, 0) >= earlier.number for w in waited):
            return
        names = ", ".join(sorted(map(repr, waited)))
        self.faults.append(f"{text} on {names} does not wait for {earlier.text} on {stream}")

    @staticmethod
    def _covers(new: _Access, old: _Access) -> bool:
        same = new.stream is old.stream and new.start <= old.start and old.stop <= new.stop
        return same and (new.writes or not old.writes)

    def _find(self, tensor: torch.Tensor) -> _Block | None:
        address = tensor.data_ptr()
        at = bisect_right(self._starts, address) - 1
        block = self._blocks.get(self._starts[at]) if at >= 0 else None
        inside = block is not None and address < block.start + block.memory.nbytes
        return block if inside else None


class _On:
    """Sets the current stream inside a ``with``."""

    def __init__(self, stack: list[LaggingStream], stream: LaggingStream) -> None:
        self._stack, self._stream = stack, stream

    def __enter__(self) -> None:
        self._stack.append(self._stream)

    def __exit__(self, *_: object) -> None:
        self._stack.pop()


class LateSize:
    """A size that is known only after the encode has run; reading it earlier is a fault."""

    def __init__(self, cuda: LaggingCuda, nbytes: int) -> None:
        """Args: cuda: the stand-in, on whose current stream the encode runs; nbytes: the size."""
        self._cuda, self._nbytes = cuda, nbytes
        self._stream = cuda.current_stream()
        self._number = self._stream.issue()

    def value(self) -> int:
        """See `cswap.codecs.base.LateSize`."""
        if self._stream.done < self._number:
            self._cuda.faults.append("a size was asked for before its encode had run")
        return self._nbytes


def memory_at(address: int, nbytes: int) -> torch.Tensor:
    """[nbytes] uint8 of the memory at an address."""
    memory = (ctypes.c_uint8 * nbytes).from_address(address) if nbytes else bytearray(1)
    return torch.frombuffer(memory, dtype=torch.uint8)
