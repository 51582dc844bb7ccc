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
    """An engine on the simulator, whose jobs run when something waits; for one thread alone.

    Args:
        seed: of the order of its jobs.
        options: see `SwapConfig`.
    """
    engine = SwapEngine(SwapConfig(**options), device=SimDevice(seed, eager=True))
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
