"""What the engine has once per device: its streams, its host store, its executor."""

from __future__ import annotations

import os
import threading
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from cswap.devices.cpu import cpu_device
from cswap.engine.executor import Executor
from cswap.engine.prefetch import ReadyBudget
from cswap.errors import ConfigError, InternalError
from cswap.pool import Allowance
from cswap.stores.disk import DiskStore
from cswap.stores.host import HostStore

if TYPE_CHECKING:
    import torch

    from cswap.config import SwapConfig
    from cswap.devices.base import Device
    from cswap.engine.handle import Handle
    from cswap.stats.counters import Counters

UNIFIED_IDLE_SHARE: Final = 0.25
"""Of the host memory used at the peak, what a unified device keeps for the next step."""


class Lane:
    """One device's way out and back.

    Attributes:
        device: the device.
        host: its host tier.
        executor: moves handles of this device.
        ready: bounds what is decoded ahead; to be used under the engine's lock.
        min_bytes: smaller tensors stay.
        may_capture: whether the device can record what it runs, as CUDA graphs do.
        overlaps: whether something can be decoded ahead, beside the computation.
        may_keep: whether a tensor may stay because swapping it does not pay.
    """

    __slots__ = (
        "_lost_jobs_before",
        "_stalled_before_s",
        "device",
        "executor",
        "host",
        "may_capture",
        "may_keep",
        "min_bytes",
        "overlaps",
        "ready",
    )

    def __init__(
        self,
        device: Device,
        config: SwapConfig,
        disk: DiskStore | None,
        counters: Counters,
        allowance: Allowance,
    ) -> None:
        # Where the host's memory is the device's, what backward gives free must come free.
        idle_share = UNIFIED_IDLE_SHARE if device.unified else 1.0
        self.host = HostStore(device.host_memory, allowance, idle_share)
        self.device = device
        self._stalled_before_s = device.stalled_s
        self._lost_jobs_before = device.lost_jobs
        self.executor = Executor(
            device, self.host, disk, counters, seed=config.seed, verify=config.verify
        )
        self.ready = ReadyBudget(device.ready_bytes)
        counters.host_is_device |= device.unified
        self.overlaps = device.overlaps
        self.may_capture = not device.unified
        self.min_bytes = config.min_bytes_on(device.kind)
        # Where host memory is device memory, moving what does not shrink saves nothing.
        self.may_keep = device.unified and config.budget is None and config.spill_dir is None

    @property
    def stalled_s(self) -> float:
        """Seconds that the device has waited for swaps since this lane was made."""
        return self.device.stalled_s - self._stalled_before_s

    @property
    def lost_jobs(self) -> int:
        """Jobs of the device that their thread did not finish, since this lane was made."""
        return self.device.lost_jobs - self._lost_jobs_before

    def trim(self, idle_bytes: int) -> None:
        """Keep no more than so many bytes for reuse in a pool."""
        if self.device.unified:
            self.host.trim(idle_bytes)
            self.device.trim(idle_bytes)

    def close(self) -> None:
        """Keep nothing for reuse."""
        self.host.close()
        self.device.trim(0)

    def has_room(self, nbytes: int) -> bool:
        """Whether so much may be decoded ahead now."""
        return self.ready.fits(nbytes) and self.device.has_room(nbytes)


class Lanes:
    """The lanes of an engine, each made when the first tensor of its device comes."""

    def __init__(
        self,
        config: SwapConfig,
        disk: DiskStore | None,
        counters: Counters,
        device: Device | None = None,
    ) -> None:
        """Args: device: the only one, in tests; config, disk, counters: the engine's."""
        self._config, self._disk, self._counters = config, disk, counters
        self._allowance = Allowance(optional_int(config.host_limit))
        self._lanes: dict[torch.device, Lane | None] = {}
        self._lock = threading.Lock()
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
        return sum(lane.device.scratch_bytes for lane in self._made())

    @property
    def stalled_s(self) -> float:
        """Seconds that all devices have waited for swaps."""
        return sum(lane.stalled_s for lane in self._made())

    @property
    def lost_jobs(self) -> int:
        """Jobs of all devices that their thread did not finish."""
        return sum(lane.lost_jobs for lane in self._made())

    def trim(self, idle_bytes: int) -> None:
        """Keep no more than so many bytes for reuse in each pool."""
        for lane in self._made():
            lane.trim(idle_bytes)

    def close(self) -> None:
        """Keep nothing for reuse."""
        for lane in self._made():
            lane.close()

    def drain(self) -> None:
        """Block until nothing is under way on any device."""
        for lane in self._made():
            lane.device.drain()

    def recount(self, handles: list[Handle]) -> None:
        """After an interrupt: add up again the bytes of these handles, all that there are."""
        for lane in self._made():
            lane.ready.recount()
            lane.executor.recount([h for h in handles if h.lane is lane])
        self._allowance.recount(sum(lane.host.in_use_bytes for lane in self._made()))

    def _made(self) -> list[Lane]:
        return [lane for lane in list(self._lanes.values()) if lane is not None]

    def _lane_for(self, device: torch.device) -> Lane | None:
        if self._only is not None:
            return self._only if device.type == self._only.device.kind else None
        if device.type == "cpu":
            return self._make(cpu_device(_workers(self._config)))
        if device.type == "cuda":
            from cswap.devices.cuda import cuda_device

            return self._make(cuda_device(device.index))
        return None

    def _make(self, device: Device) -> Lane:
        return Lane(device, self._config, self._disk, self._counters, self._allowance)


def disk_store(config: SwapConfig, counters: Counters) -> DiskStore | None:
    """The disk tier, shared by all devices; None if there is none. Its failures are counted.

    Raises:
        ConfigError: the directory cannot be written.
    """
    if config.spill_dir is None:
        return None
    report = partial(counters.fall_back, then="such files stay on the disk")
    try:
        return DiskStore(Path(config.spill_dir), optional_int(config.spill_limit), report)
    except OSError as error:
        raise ConfigError(
            f"spill_dir={str(config.spill_dir)!r}: cannot be written: {error.strerror}. "
            "Name a directory that this user may write to."
        ) from error


def _workers(config: SwapConfig) -> int:
    if config.workers is not None:
        return config.workers
    return max(1, min(4, (os.cpu_count() or 2) // 2))


def optional_int(value: Any) -> int | None:
    """A size option that config has parsed already.

    Raises:
        InternalError: it has not.
    """
    if value is None or isinstance(value, int):
        return value
    raise InternalError(f"unparsed size {value!r}")
