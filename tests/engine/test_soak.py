"""Two thousand steps with a budget and a disk tier: nothing grows."""

from __future__ import annotations

import gc
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import cswap
from cswap.engine.transfer.handle import Handle

STEPS = 2000

BETWEEN_CHECKS = 230
"""After so many steps the guard, which checks every 100, has no notes. Notes hold the handles of a
step, and these are fewer where the advisor happens to have a tensor computed again."""


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(64, 128), nn.ReLU(), nn.BatchNorm1d(128), nn.Linear(128, 128), nn.GELU(),
        nn.Dropout(), nn.Linear(128, 64), nn.Softmax(dim=1),
    )  # fmt: skip


def held(engine):
    # Pools keep idle buffers, of as many sizes as encodings have had by chance. A handle that has
    # left has a tensor without elements, which counts versions.
    engine._state.lanes.trim(0)
    gc.collect()
    return {
        "handles": sum(type(o) is Handle for o in gc.get_objects()),
        "tensors": sum(type(o) is torch.Tensor and o.numel() > 0 for o in gc.get_objects()),
        "threads": threading.active_count(),
        "descriptors": len(list(Path("/proc/self/fd").iterdir())),
    }


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["auto", "int8"])
def test_nothing_grows(tmp_path, codec):
    torch.set_num_threads(1)
    model, x = net(), torch.randn(128, 64)
    options = {"codec": codec} if codec != "auto" else {"policy": "static:zvc"}
    limits = {"budget": "100KiB", "host_limit": "80KiB", "spill_dir": tmp_path}
    with cswap.install(model, min_bytes=0, **options, **limits) as handle:

        def steps(n):
            for i in range(n):
                loss = model(x).square().sum()
                if i % 5:  # now and then no backward, and now and then two
                    loss.backward(retain_graph=i % 3 == 0)
                if i % 15 == 3:
                    loss.backward()
            handle.engine.synchronize()
            assert handle.stats.device_bytes == handle.stats.host_bytes == 0

        steps(BETWEEN_CHECKS)
        before = held(handle.engine)
        steps(STEPS)
        stats = handle.stats
        after, deadline = held(handle.engine), time.monotonic() + 20
        while any(after[k] > before[k] for k in before) and time.monotonic() < deadline:
            handle.engine.collect()  # engines' own thread may be at a tensor
            after = held(handle.engine)
    assert stats.swapped > STEPS
    assert stats.disk_bytes == 0
    assert {k: after[k] for k in before if after[k] > before[k]} == {}
    assert list(tmp_path.iterdir()) == []
