"""Checks of engines, for tests."""

from __future__ import annotations

import gc
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from cswap.engine.engine import SwapEngine

FREED_WITHIN_S: Final = 5.0


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
