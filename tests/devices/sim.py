"""`SimDevice`: a device with a link for tests, whose streams lag behind the host.

It needs no patch of torch: tensors of its computation are torch's own, and have run when they are
saved. The work of its other streams runs at random, or when the host waits for it; `LaggingCuda`
checks that events order it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from bench.twin.lagging_cuda import LaggingCuda, memory_at
from cswap.devices.base import LinkDevice

if TYPE_CHECKING:
    from cswap.devices.side_streams import SideStreams

TOTAL_BYTES = 1 << 40


class SimDevice(LinkDevice):
    """One engine's device.

    Attributes:
        cuda: has its streams and memory; ``faults`` names memory that was used too early.
    """

    kind = "cpu"
    backlog_bytes = 1 << 40
    ready_bytes = 1 << 30

    def __init__(self, seed: int, *, part_bytes: int | None = None) -> None:
        """Args: seed: of the order in which streams run; part_bytes: see `LinkDevice`."""
        self.part_bytes = part_bytes
        self.cuda = LaggingCuda(seed, TOTAL_BYTES)
        self._held: list[torch.Tensor] = []
        self._side_streams = SimStreams(self.cuda)

    def allocate(
        self, sizes: tuple[int, ...], strides: tuple[int, ...], *, dtype: torch.dtype
    ) -> torch.Tensor:
        """See `Device.allocate`."""
        flat = self.cuda.empty(torch.Size(sizes).numel(), dtype=dtype, device="sim")
        return flat.as_strided(sizes, strides)

    def host_memory(self, nbytes: int) -> torch.Tensor:
        """See `Device.host_memory`."""
        return self.cuda.empty(nbytes, dtype=torch.uint8)

    def now(self) -> Any:
        """See `Device.now`."""
        event = self.cuda.Event()
        event.record(self.cuda.default)
        return event

    def join(self, moment: Any) -> None:
        """See `Device.join`."""
        self.cuda.default.wait_event(moment)

    def drain(self) -> None:
        """See `Device.drain`."""
        self.cuda.synchronize()
        self._held.clear()

    def hold(self, memory: torch.Tensor, after: Any) -> None:
        """See `LinkDevice.hold`: until all work has run."""
        self._held.append(memory)

    def let_go_held(self) -> None:
        """See `LinkDevice.let_go_held`."""

    def side_streams(self) -> SideStreams:
        """See `LinkDevice.side_streams`."""
        return self._side_streams


class SimStreams:
    """See `SideStreams`."""

    def __init__(self, cuda: LaggingCuda) -> None:
        """Args: cuda: has the streams."""
        self._cuda = cuda
        self.codec, self.d2h, self.h2d = cuda.Stream(), cuda.Stream(), cuda.Stream()
        self.memcpy: Any = self._copy
        self.new_event: Any = cuda.Event

    def current(self) -> Any:
        """See `SideStreams.current`; meanwhile some work runs."""
        cuda = self._cuda
        cuda.run_some(cuda._random.choice([0, 0, 0, 1, 2, 8]))
        return cuda.current_stream()

    def _copy(self, target: int, source: int, nbytes: int, _direction: int, stream: int) -> None:
        on = next(s for s in self._cuda.streams if s.cuda_stream == stream)
        with self._cuda.stream(on):
            self._cuda.touch(memory_at(source, nbytes), writes=False, text="copy")
            self._cuda.touch(memory_at(target, nbytes), writes=True, text="copy")
        memory_at(target, nbytes).copy_(memory_at(source, nbytes))

    def is_capturing(self) -> bool:
        """See `SideStreams.is_capturing`."""
        return False

    def prepare_thread(self) -> None:
        """See `SideStreams.prepare_thread`."""

    def before(self) -> Any:
        """See `SideStreams.before`."""
        return len(self._cuda._stack())

    def enter(self, stream: Any) -> None:
        """See `SideStreams.enter`."""
        self._cuda._stack().append(stream)

    def leave(self, before: Any) -> None:
        """See `SideStreams.leave`."""
        del self._cuda._stack()[before:]

    def stall(self, stream: Any, event: Any) -> None:
        """See `SideStreams.stall`."""
        stream.wait_event(event)

    def origin(self) -> tuple[Any, float]:
        """See `SideStreams.origin`."""
        return self._cuda.Event(), 1.0

    def allocate(self, nbytes: int) -> torch.Tensor:
        """See `SideStreams.allocate`."""
        with self._cuda.stream(self.codec):
            return self._cuda.empty(nbytes, dtype=torch.uint8, device="sim")
