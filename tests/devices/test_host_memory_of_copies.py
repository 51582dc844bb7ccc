"""Host memory lives until the copies of it have run: its allocator gives it out again at once."""

from __future__ import annotations

import time
import weakref

import pytest
import torch

from cswap.codecs.pinned_sizes import SizePool
from tests.devices.lagging_machine import LaggingMachine

N, NUMEL = 6, 1 << 14


@pytest.fixture
def machine(monkeypatch):
    made = LaggingMachine(monkeypatch)
    yield made
    assert not made.cuda.faults, made.cuda.faults[:5]


class Released:
    """Notes which tensors of the host's memory die before the device has run."""

    def __init__(self, device, monkeypatch):
        self.dead = 0
        allocate = device.host_memory

        def noted(nbytes):
            memory = allocate(nbytes)
            weakref.finalize(memory, self.note)
            return memory

        monkeypatch.setattr(device, "host_memory", noted)

    def note(self):
        self.dead += 1


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_memory_that_a_file_was_read_into(machine, monkeypatch, codec, tmp_path):
    released = Released(machine.device, monkeypatch)
    engine = machine.engine(codec, spill_dir=tmp_path, host_limit=4096)
    engine.begin_step()
    packed, values = machine.save(engine, N, NUMEL)
    engine.synchronize()
    deadline = time.monotonic() + 10
    while released.dead < N and time.monotonic() < deadline:  # of a thread that wrote the files
        time.sleep(0.001)
    before = released.dead
    while packed:  # the device stands still
        back = engine.unpack(packed.pop())
        assert torch.equal(back, values.pop())
        del back
    assert released.dead == before
    machine.cuda.synchronize()
    machine.device.drain()
    assert released.dead >= before + N
    engine.close()


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_buffers_of_an_engine_that_is_closed(machine, monkeypatch, codec):
    released = Released(machine.device, monkeypatch)
    engine = machine.engine(codec)
    for _ in range(2):
        engine.begin_step()
        packed, _ = machine.save(engine, N, NUMEL)
        machine.cuda.synchronize()
        engine._state.lanes.pump()
        while packed:
            engine.unpack(packed.pop())
        engine.collect()
    engine.close()
    assert released.dead == 0  # the copies back are under way
    machine.cuda.synchronize()
    machine.device.drain()
    assert released.dead >= N


def test_a_size_whose_reading_is_interrupted_is_read_once_more():
    pool = SizePool(lambda: torch.zeros(1, dtype=torch.int64))
    size = pool.take()
    slot = size._slot
    assert slot is not None
    slot.numbers[0] = 77

    class Interrupted:
        def __getitem__(self, _index):
            raise KeyboardInterrupt

    numbers = slot.numbers
    object.__setattr__(slot, "numbers", Interrupted())
    with pytest.raises(KeyboardInterrupt):
        size.value()
    object.__setattr__(slot, "numbers", numbers)
    assert size.value() == size.value() == 77
