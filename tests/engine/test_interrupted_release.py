"""An interrupt while an encoding is freed: its memory is given back once."""

from __future__ import annotations

import pytest
import torch

from cswap.codecs.base import DEFAULT_KEY
from cswap.codecs.registry import get_codec
from cswap.devices.cpu import CpuDevice
from cswap.engine.saved.reclaim import Reclaimer
from cswap.engine.transfer.device_lanes import make_executor
from cswap.pool import BufferPool
from cswap.stats.counters import Counters

N = 1 << 14


def test_memory_that_is_lent_again_is_not_given_back_by_a_death_before(monkeypatch):
    device, counters = CpuDevice(), Counters()
    pool, reclaimer = BufferPool(device.host_memory), Reclaimer(counters)
    executor = make_executor(
        device, pool, None, counters, reclaimer.watch_encoding, seed=0, verify=False
    )
    in_line, codec = executor.in_line, get_codec("raw")
    assert in_line is not None
    first = in_line.encode(torch.zeros(N), codec, DEFAULT_KEY)
    with monkeypatch.context() as patch:

        def interrupted(**_):
            raise KeyboardInterrupt

        del first
        patch.setattr(counters, "hold", interrupted)  # after the memory was given back
        with pytest.raises(KeyboardInterrupt):
            reclaimer.collect()
    second = in_line.encode(torch.ones(N), codec, DEFAULT_KEY)  # by another thread, in between
    reclaimer.collect()
    third = in_line.encode(torch.full((N,), 2.0), codec, DEFAULT_KEY)
    for stored, value in ((second, 1.0), (third, 2.0)):
        out, _ = in_line.decode(stored, torch.float32, N)
        assert torch.equal(out, torch.full((N,), value))
    assert second.loan is not None
    assert third.loan is not None
    assert second.loan.buffer.data_ptr() != third.loan.buffer.data_ptr()
