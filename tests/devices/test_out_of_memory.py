"""A device or a host that is out of memory in the middle of a tensor's way: no byte is wrong."""

from __future__ import annotations

import errno
import faulthandler
import os
from collections import Counter

import pytest
import torch

from cswap.codecs.tiled import TiledCodec
from cswap.engine.link import way_out
from cswap.engine.transfer.resources import checksum
from tests.devices.lagging_machine import LaggingMachine
from tests.devices.saved import assert_nothing_is_held
from tests.devices.test_link_slots import MIB, NUMEL, N, ask_all, fails, machine, warm_up
from tests.devices.test_random_slots import Steps, random_kind
from tests.devices.test_sizes_of_encodings import grown

__all__ = ["machine"]

LONGEST_S = 20


@pytest.fixture(autouse=True)
def no_hang():
    faulthandler.dump_traceback_later(LONGEST_S, exit=True)
    yield
    faulthandler.cancel_dump_traceback_later()


def test_an_encoding_that_has_grown_finds_no_memory_at_first(machine, monkeypatch):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    engine._replay.review()
    grown(engine)
    again = way_out.WayOut._encode_again

    def without_memory(self, part, owner):
        monkeypatch.setattr(way_out.WayOut, "_encode_again", again)
        machine.cuda.failures = [0]  # room is made by looking at all sizes, this one's, too
        again(self, part, owner)

    monkeypatch.setattr(way_out.WayOut, "_encode_again", without_memory)
    packed, values = machine.save(engine, N, NUMEL)
    engine.synchronize()
    assert machine.cuda.emptied == 1
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    assert engine.stats.fallbacks == 0
    assert_nothing_is_held(machine, engine)


def test_room_is_made_while_sums_are_added_up_again(machine):
    engine = machine.engine("zvc", host_limit=1000)
    engine.begin_step()
    packed, values = machine.save(engine, 2, NUMEL)
    machine.cuda.failures = [0]
    engine._state.interrupted = True  # as after a Ctrl-C
    engine._state.tidy(in_step=True)
    assert machine.cuda.emptied == 1
    ask_all(machine, engine, packed, values)
    assert_nothing_is_held(machine, engine)


class Starving(Steps):
    """Random steps whose device has no memory for an allocation now and then."""

    def __init__(self, machine, seed, **options):
        super().__init__(machine, seed, **options)
        self.tensor = machine.tensor
        machine.tensor = self.fed

    def fed(self, *arguments):
        cuda = self.machine.cuda
        failures, cuda.failures = cuda.failures, []  # the program's own tensors have room
        try:
            return self.tensor(*arguments)
        finally:
            cuda.failures = failures

    def progress(self):
        super().progress()
        if self.random.random() < 0.3:
            self.machine.cuda.failures = [self.random.randrange(6)]


@pytest.mark.parametrize(
    "seeds", [range(10), pytest.param(range(10, 300), marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_steps_of_a_device_that_is_out_of_memory(monkeypatch, tmp_path, seeds):
    reached: Counter[str] = Counter()
    for seed in seeds:
        faulthandler.dump_traceback_later(LONGEST_S, exit=True)
        options, is_late = random_kind(seed, tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr("cswap.engine.link.link_way.PART_ALIGN", 64)
            patch.setattr(TiledCodec, "late_payload", is_late)
            machine = LaggingMachine(patch, seed)
            steps = Starving(machine, seed, **options)
            steps.run(8)
            steps.engine.close()
            assert not machine.cuda.faults, (seed, machine.cuda.faults[:3])
            reached.update(emptied=machine.cuda.emptied, away=steps.n_away)
    assert min(reached.values()) > 10 * len(seeds)


# -------------------------------------------------------- no memory of the host


def test_the_checksum_of_an_encoding_on_the_device_waits_for_it(machine, monkeypatch):
    engine = machine.engine("int8", verify=True, host_limit=1000)

    def reading(*tensors):
        for one in tensors:
            machine.cuda.touch(one, writes=False, text="checksum")
        return checksum(*tensors)

    monkeypatch.setattr("cswap.engine.transfer.link_executor.checksum", reading)
    engine.begin_step()
    packed = engine.pack(machine.tensor(NUMEL))
    machine.use(engine.unpack(packed))
    assert engine.stats.fallbacks_by_reason == {"host_limit": 1}


def test_a_verified_tensor_whose_encode_fails_late_stays(machine, monkeypatch):
    engine = machine.engine("int8", verify=True)
    engine.begin_step()
    monkeypatch.setattr(way_out, "checked_size", fails)
    x = machine.tensor(NUMEL)
    value = x.clone()
    packed = engine.pack(x)
    assert torch.equal(engine.unpack(packed), value)


def test_with_a_full_disk_the_hosts_memory_has_a_bound(machine, tmp_path, monkeypatch):
    write = os.pwrite

    def of_64_kib(descriptor, data, offset):
        if offset + len(data) > 1 << 16:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(descriptor, data, offset)

    monkeypatch.setattr(os, "pwrite", of_64_kib)
    options = {"spill_dir": tmp_path, "host_limit": 2 * MIB}
    engine = machine.engine("raw", **options)
    for _ in range(2):
        engine.begin_step()
        packed, values = machine.save(engine, N, NUMEL)
        engine.synchronize()
        stats = engine.stats
        ask_all(machine, engine, packed, values)
        machine.cuda.synchronize()
        engine._end_backward()
    assert stats.host_bytes <= 3 * MIB
    assert stats.device_bytes >= (N - 3) * MIB  # they stay
    assert_nothing_is_held(machine, engine)
    engine.close()


def test_memory_that_was_borrowed_is_counted_once_after_an_interrupt(machine, monkeypatch):
    engine = machine.engine("zvc")
    engine.begin_step()
    packed, values = machine.save(engine, 1, NUMEL)
    issue = way_out.WayOut._issue

    def interrupted(self, *_):
        monkeypatch.setattr(way_out.WayOut, "_issue", issue)
        raise KeyboardInterrupt

    monkeypatch.setattr(way_out.WayOut, "_issue", interrupted)
    with pytest.raises(KeyboardInterrupt):
        engine.synchronize()
    engine._state.interrupted = True
    engine._state.tidy()
    assert engine.stats.host_bytes == engine._state.lanes._only.host.in_use_bytes
    ask_all(machine, engine, packed, values)
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_nothing_is_asked_of_a_device_whose_work_is_captured(machine, monkeypatch, codec):
    engine = machine.engine(codec)
    for _ in range(3):
        engine.begin_step()
        engine._replay.review()
        packed, values = machine.save(engine, 4, NUMEL)
        ask_all(machine, engine, packed, values)
        engine._end_backward()
    machine.cuda.synchronize()
    asked = []
    query = machine.cuda.event_type.query

    def noted(event):
        if machine.cuda.capturing:
            asked.append(event)
        return query(event)

    monkeypatch.setattr(machine.cuda.event_type, "query", noted)
    machine.cuda.capturing = True
    engine.begin_step()
    engine._replay.review()
    packed, _ = machine.save(engine, 4, NUMEL)
    while packed:
        engine.unpack(packed.pop())
    engine._end_backward()
    machine.cuda.capturing = False
    assert asked == []
