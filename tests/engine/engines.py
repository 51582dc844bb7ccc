"""Checks of engines, for tests."""

from __future__ import annotations

import gc
import time
from typing import Any, Final

from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.saved import reclaim
from tests.devices.sim import SimDevice

FREED_WITHIN_S: Final = 5.0


def engine_over_a_link(seed: int, **options: Any) -> SwapEngine:
    """An engine on a device that lags, whose work runs when something waits; for one thread alone.

    Args:
        seed: of the order in which its streams run.
        options: see `SwapConfig`.
    """
    engine = SwapEngine(SwapConfig(**options), device=SimDevice(seed))
    reclaim._reclaimers.discard(engine._state.reclaimer)  # engines' own thread is another one
    return engine


def assert_empty(engine: SwapEngine) -> None:
    """Check that an engine holds no bytes after its running jobs have ended.

    Raises:
        AssertionError: the engine still holds bytes after five seconds.
    """
    engine.synchronize()
    gc.collect()
    deadline = time.monotonic() + FREED_WITHIN_S
    while True:  # jobs of dropped tensors free their memory when they end
        stats = engine.stats
        held = (stats.device_bytes, stats.host_bytes, stats.disk_bytes)
        if not any(held) or time.monotonic() > deadline:
            break
        time.sleep(0.001)
    assert held == (0, 0, 0), f"still held: device, host, disk = {held} bytes"
    only: Any = engine._state.lanes._only
    if only is not None and isinstance(only.device, SimDevice):
        assert not only.device.cuda.faults
