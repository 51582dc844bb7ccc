"""Orders of events over a link that are rare: on the stand-in, whose device runs when it is let."""

from __future__ import annotations

import pytest
import torch

from cswap.engine.link import way_out
from tests.devices.lagging_machine import LaggingMachine

MIB = 1 << 20
NUMEL = 1 << 16


@pytest.fixture
def machine(monkeypatch):
    made = LaggingMachine(monkeypatch)
    yield made
    assert made.cuda.faults == []


def fails(*_):
    raise ValueError("on purpose")


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_a_region_with_gaps_that_comes_back_ahead(machine, codec):
    """It is gathered on a side stream, from memory that nobody else may be given before."""
    engine = machine.engine(codec)
    engine.begin_step()
    packed, values = [], []
    for i in range(6):
        whole = machine.tensor(NUMEL, i)
        x = whole.view(64, 1024)[:8, ::2]  # an eighth of its storage, with gaps
        packed.append(engine.pack(x))
        values.append(x.clone())
        assert packed[-1].token.handle.gathered
        del whole, x
    machine.cuda.synchronize()
    engine._state.lanes.pump()
    while packed:
        back = engine.unpack(packed.pop())
        machine.use(back)
        assert torch.equal(back, values.pop())
        del back
    assert engine.stats.prefetch_hits == 5


def test_a_tensor_stays_whose_encode_fails_when_its_size_is_asked_for(machine, monkeypatch):
    engine = machine.engine("zvc")
    monkeypatch.setattr(way_out, "checked_size", fails)
    packed, values = machine.save(engine, 1, NUMEL)
    region = packed[0].token.stored.region
    while not region.read.query():  # the encode, and nothing else
        machine.cuda.run_some()
    engine._state.lanes.pump()
    assert region.stays
    machine.tensor(NUMEL, 77)  # would be given the memory, had it been let go
    back = engine.unpack(packed[0])
    machine.use(back)
    assert torch.equal(back, values[0])
    assert engine.stats.fallbacks_by_reason == {"zvc:encode": 1}


@pytest.mark.parametrize("dies", [True, False])
def test_an_encoding_for_which_the_host_has_no_memory_is_counted_while_it_is_held(
    machine, monkeypatch, dies
):
    """It may have been let go while the host was asked."""
    engine = machine.engine("zvc")
    packed, values = machine.save(engine, 1, NUMEL)
    lane = engine._state.lanes._only
    monkeypatch.setattr(lane.host, "take", lambda _nbytes: None)
    if dies:
        machine.drop_in_take(engine, packed)
    lane.executor.link.let_go_down_to(0)
    machine.cuda.synchronize()
    engine._state.lanes.pump()
    engine.synchronize()
    assert (engine.stats.device_bytes > 0) is not dies
    if not dies:
        assert torch.equal(engine.unpack(packed.pop()), values[0])
    engine.collect()
    assert engine.stats.device_bytes == 0
    machine.cuda.synchronize()
    assert engine.scratch_bytes == 0
