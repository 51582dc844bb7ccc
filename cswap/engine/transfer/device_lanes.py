"""The way out and back of each device: its host store, its executor, its bounds."""

from __future__ import annotations

import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap.devices.base import LinkDevice
from cswap.devices.cpu import cpu_device
from cswap.devices.freed_memory import FreedMemory
from cswap.engine.transfer.disk_queue import DiskQueue
from cswap.engine.transfer.host_executor import HostExecutor
from cswap.engine.transfer.link_executor import LinkExecutor
from cswap.engine.transfer.resources import Resources
from cswap.errors import ConfigError, InternalError, UnsupportedError
from cswap.pool import Allowance, BufferPool
from cswap.stores.disk import DiskStore

if TYPE_CHECKING:
    from collections.abc import Callable

    import torch

    from cswap.config import SwapConfig
    from cswap.devices.base import Device
    from cswap.engine.saved.reclaim import Reclaimer
    from cswap.engine.transfer.executor import Executor
    from cswap.engine.transfer.stored import Free, Held, Stored
    from cswap.pool import Loan
    from cswap.stats.counters import Counters

MOST_AHEAD: Final = 16
"""Tensors that come back ahead over a link at most, within the bounds in bytes."""

UNIFIED_IDLE_SHARE: Final = 0.25
"""Of the host memory used at the peak, a unified device keeps this share for the next step."""


class Lane:
    """One device's way out and back.

    Attributes:
        device: the device.
        host: its host tier.
        executor: moves handles of this device.
        ahead: tensors that may come back ahead, unless a plan says how many; 0: no link, none.
        min_bytes: smaller tensors stay.
        ready_bytes: that may wait to be asked for again (saved/results.py).
        may_capture: whether the device can record the work that it runs, as CUDA graphs do.
        may_keep: whether a tensor may stay because no codec is worth its time.
        step_bytes: memory of the device for all of the step; None: no limit, or nobody counts.
    """

    __slots__ = (
        "_freed",
        "_stalled_before_s",
        "ahead",
        "device",
        "executor",
        "host",
        "may_capture",
        "may_keep",
        "min_bytes",
        "ready_bytes",
        "step_bytes",
    )

    def __init__(
        self,
        device: Device,
        config: SwapConfig,
        disk: DiskStore | None,
        counters: Counters,
        allowance: Allowance,
        reclaimer: Reclaimer,
    ) -> None:
        # Where the host's memory is the device's, memory that backward gives free must come free.
        idle_share = UNIFIED_IDLE_SHARE if device.unified else 1.0
        self.host = BufferPool(
            device.host_memory,
            idle_share,
            allowance,
            discard=partial(_hold, device),
            size_of=device.host_size,
        )
        self.device = device
        self._stalled_before_s = device.stalled_s
        self._freed = FreedMemory() if device.unified else None
        self.executor = make_executor(
            device,
            self.host,
            disk,
            counters,
            reclaimer.watch_encoding,
            seed=config.seed,
            verify=config.verify,
        )
        budget = optional_int(config.budget)
        self.ready_bytes = min(device.ready_bytes, device.ready_bytes if budget is None else budget)
        counters.host_is_device |= device.unified
        self.ahead = 0 if device.unified else MOST_AHEAD
        self.may_capture = not device.unified
        self.min_bytes = config.min_bytes_on(device.kind)
        # Where host memory is device memory, moving bytes that do not shrink saves nothing.
        self.may_keep = device.unified and config.budget is None and config.spill_dir is None
        self.step_bytes: int | None = None

    @property
    def stalled_s(self) -> float:
        """Seconds that the device has waited for swaps since this lane was made."""
        return self.device.stalled_s - self._stalled_before_s

    def hold_within(self, budget_bytes: int) -> None:
        """Let go of tensors on their way out until so many bytes of them are left."""
        if self.executor.link is not None:
            self.executor.link.let_go_down_to(budget_bytes)

    def hold_step(self) -> None:
        """Let go of tensors on their way out until the device's memory is within the plan's."""
        excess, link = self._excess(0), self.executor.link
        if excess > 0 and link is not None:
            link.let_go_down_to(max(0, link.sources.nbytes - excess))

    def _excess(self, nbytes: int) -> int:
        # Bytes above the plan's limit, with so many more allocated.
        if self.step_bytes is None:
            return 0
        allocated = self.device.allocated_bytes()
        return 0 if allocated is None else allocated + nbytes - self.step_bytes

    def trim(self, idle_bytes: int) -> None:
        """Keep no more than so many bytes for reuse in a pool."""
        if self.device.unified:
            self.host.trim(idle_bytes)
        if self.executor.link is not None:
            self.executor.link.trim()

    def backward_ended(self) -> None:
        """All that its graph held is gone."""
        if self._freed is not None:
            self._freed.backward_ended()

    @property
    def scratch_bytes(self) -> int:
        """See `Lanes.scratch_bytes`."""
        return 0 if self.executor.link is None else self.executor.link.scratch_bytes

    def close(self) -> None:
        """Keep nothing for reuse."""
        if self.executor.link is not None:
            self.executor.link.close()
        self.host.close()
        if self._freed is not None:
            self._freed.release()

    def fits_plan(self, nbytes: int) -> bool:
        """Whether so much more is within the memory that a plan was made for."""
        return self.step_bytes is None or self._excess(nbytes) <= 0


class Lanes:
    """The lanes of an engine, each made when the first tensor of its device comes.

    Attributes:
        links: of the lanes, where there are any.
    """

    def __init__(
        self,
        config: SwapConfig,
        disk: DiskStore | None,
        counters: Counters,
        reclaimer: Reclaimer,
        device: Device | None = None,
        *,
        step_bytes: int | None = None,
        relieve: Callable[[], None] | None = None,
    ) -> None:
        """Make no lane yet.

        Args:
            config: the engine's options.
            disk: the engine's disk tier, or None.
            counters: the engine's.
            reclaimer: the engine's.
            device: the only one, in tests.
            step_bytes: memory of each device for all of the step, by a plan; None: no limit.
            relieve: a bound method to be called when a device is out of memory.
        """
        self._config, self._disk, self._counters = config, disk, counters
        self._step_bytes, self._relieve = step_bytes, relieve
        self._allowance = Allowance(optional_int(config.host_limit))
        self._lanes: dict[torch.device, Lane | None] = {}
        self._lock = threading.Lock()
        self._reclaimer, self.links = reclaimer, reclaimer.links
        self._copies = 0, False
        self._only = None if device is None else self._make(device)
        self.min_bytes = min(config.min_bytes_on(kind) for kind in ("cpu", "cuda"))

    def of(self, device: torch.device) -> Lane | None:
        """The lane of tensors on this device; None if nothing is swapped there."""
        found = self._lanes.get(device)
        if found is not None:
            return found
        with self._lock:
            if device not in self._lanes:
                self._lanes[device] = self._lane_for(device)
            return self._lanes[device]

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory on all devices."""
        return sum(lane.scratch_bytes for lane in self._made())

    @property
    def stalled_s(self) -> float:
        """Seconds that all devices have waited for swaps."""
        return sum(lane.stalled_s for lane in self._made())

    def trim(self, idle_bytes: int) -> None:
        """Keep no more than so many bytes for reuse in each pool."""
        for lane in self._made():
            lane.trim(idle_bytes)

    def plan_copies(self, most_bytes: int, *, spares: bool) -> None:
        """See `SwapEngine.plan_copies`; of lanes that are made later, too."""
        self._copies = most_bytes, spares
        for link in self.links:
            link.planned_bytes, link.spares = most_bytes, spares

    def backward_ended(self) -> None:
        """See `Lane.backward_ended`."""
        for lane in self._made():
            lane.backward_ended()

    def close(self) -> None:
        """Keep nothing for reuse."""
        for lane in self._made():
            lane.close()

    def pump(self) -> None:
        """Look at what all devices have done by now."""
        for link in self.links:
            link.pump()

    def drain(self) -> None:
        """Block until nothing is under way on any device."""
        for lane in self._made():
            lane.device.drain()
        for link in self.links:
            link.drain()

    def recount(self) -> None:
        """After an interrupt, and a wait for the devices: add up again what is in use."""
        for lane in self._made():
            lane.host.recount()
            lane.executor.recount()
        self._allowance.recount(sum(lane.host.in_use_bytes for lane in self._made()))

    def _made(self) -> list[Lane]:
        return [lane for lane in list(self._lanes.values()) if lane is not None]

    def _lane_for(self, device: torch.device) -> Lane | None:
        if self._only is not None:
            return self._only if device.type == self._only.device.kind else None
        if device.type == "cpu":
            return self._make(cpu_device())
        if device.type == "cuda":
            from cswap.devices.cuda import cuda_device

            try:
                return self._make(cuda_device(device.index))
            except UnsupportedError as error:
                self._counters.fall_back("device", error, "its tensors stay on the device")
        return None

    def _make(self, device: Device) -> Lane:
        if self._relieve is not None:
            device.relieve_by(self._relieve)
        lane = Lane(
            device, self._config, self._disk, self._counters, self._allowance, self._reclaimer
        )
        lane.step_bytes = self._step_bytes
        link = lane.executor.link
        if link is not None:
            link.planned_bytes, link.spares = self._copies
            self.links.append(link)
        return lane


def make_executor(
    device: Device,
    host: BufferPool,
    disk: DiskStore | None,
    counters: Counters,
    watch: Callable[[Stored, Held, Free], None],
    *,
    seed: int,
    verify: bool,
) -> Executor:
    """The executor of a device; arguments as of `Resources`."""
    files = None if disk is None or device.unified else DiskQueue(disk, device.host_memory)
    lock = threading.Lock()
    before = len(device.damage())
    resources = Resources(
        device, host, disk, files, counters, watch, lock, seed, verify, damages_before=before
    )
    if isinstance(device, LinkDevice):
        return LinkExecutor(resources, device.side_streams())
    return HostExecutor(resources)


def _hold(device: Device, loan: Loan) -> None:
    if isinstance(device, LinkDevice) and loan.after is not None:
        device.hold(loan.buffer, loan.after)


def disk_store(config: SwapConfig) -> DiskStore | None:
    """The disk tier, shared by all devices; None if there is none.

    Raises:
        ConfigError: the directory cannot be written.
    """
    if config.spill_dir is None:
        return None
    try:
        return DiskStore(Path(config.spill_dir))
    except OSError as error:
        raise ConfigError(
            f"spill_dir={str(config.spill_dir)!r}: cannot be written: {error.strerror}. "
            "Name a directory that this user may write to."
        ) from error


def optional_int(value: Any) -> int | None:
    """A size option that config has parsed already.

    Raises:
        InternalError: it has not.
    """
    if value is None or isinstance(value, int):
        return value
    raise InternalError(f"unparsed size {value!r}")
