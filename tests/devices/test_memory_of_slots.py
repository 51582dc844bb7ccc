"""Bounds of the memory that slots over a link take."""

from __future__ import annotations

import pytest
import torch

from cswap.engine.link import link
from cswap.engine.saved.away import Away
from cswap.engine.saved.packed import PackedView
from cswap.schema.plan import Decision, Plan
from tests.devices.saved import assert_nothing_is_held, result
from tests.devices.test_link_slots import (
    BY_SLOTS,
    GENERAL_WAY,
    MIB,
    NUMEL,
    N,
    are_copied,
    ask_all,
    codec,
    machine,
    small,
    warm_up,
)
from tests.engine.looks import look_every

__all__ = ["codec", "machine", "small"]

pytestmark = pytest.mark.sampled


def test_tensors_that_have_to_be_rounded_count_once_while_they_leave(small):
    engine = small.engine("int8")
    engine.begin_step()
    packed, _ = small.save(engine, 16, NUMEL)
    while packed:
        engine.unpack(packed.pop())
    engine._end_backward()
    engine.begin_step()
    engine._replay.review()
    for slot in engine.packer.book.slots:
        slot.way.round_trip = True
    sources = engine._state.lanes._only.executor.link.sources
    packed, _ = small.save(engine, 16, NUMEL)
    assert are_copied(packed)
    while packed:
        engine.unpack(packed.pop())
        assert sources.asked_bytes == sum(r.way.nbytes for r in sources._regions if r.asked)
    engine._end_backward()
    small.cuda.synchronize()
    assert_nothing_is_held(small, engine)


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_less_comes_back_ahead_while_tensors_that_were_asked_for_still_leave(small, codec):
    engine = small.engine(codec)
    warm_up(small, engine, 16)
    link_ = engine._state.lanes._only.executor.link
    packed, values = small.save(engine, 16, NUMEL)
    bounds = []
    while packed:  # the device stands still meanwhile
        ask_all(small, engine, [packed.pop()], [values.pop()])
        sources = link_.sources
        own = sum(r.way.nbytes for r in sources._regions if r.asked)
        assert sources.asked_bytes == own
        bounds.append((link_.ahead.nbytes + own // 2, own))
    assert max(own for _, own in bounds) >= MIB
    assert max(both for both, _ in bounds) <= link_.ahead.most_bytes
    engine._end_backward()
    small.cuda.synchronize()
    assert_nothing_is_held(small, engine)
    assert link_.sources.asked_bytes == 0


@pytest.mark.parametrize("codec", [pytest.param("raw", marks=pytest.mark.slow), "zvc"])
def test_sources_under_way_are_bounded_while_the_device_stands_still(small, codec):
    engine = small.engine(codec)
    warm_up(small, engine, 48)
    before = small.cuda.allocated_bytes
    packed, _ = small.save(engine, 48, NUMEL)
    assert are_copied(packed)
    assert small.cuda.peak_bytes - before <= small.device.backlog_bytes + 2 * MIB


@pytest.fixture
def much(machine, monkeypatch):
    """All tensors may be under way."""
    machine.device.backlog_bytes = 2 * N * MIB
    monkeypatch.setattr(link, "STEP_SHARE", 1)


@pytest.mark.usefixtures("much")
def test_memory_goes_when_it_has_been_read_and_nobody_saves_any_more(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine)
    packed, _ = machine.save(engine, N, NUMEL)
    assert codec != "raw" or machine.cuda.allocated_bytes >= (N - 1) * MIB
    machine.cuda.synchronize()
    engine._state.reclaimer.collect()  # as a thread does it
    assert engine.stats.device_bytes == 0
    assert are_copied(packed)
    packed.clear()
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("codec", [pytest.param("raw", marks=pytest.mark.slow), "zvc"])
def test_in_backward_memory_is_bounded_and_the_host_waits_for_nothing(small, codec):
    engine = small.engine(codec)
    warm_up(small, engine, 48)
    packed, values = small.save(engine, 48, NUMEL)
    engine.synchronize()
    small.cuda.peak_bytes = small.cuda.allocated_bytes
    waits = small.cuda.waits
    ask_all(small, engine, packed, values)
    assert small.cuda.peak_bytes <= small.device.ready_bytes + 3 * MIB
    assert small.cuda.waits == waits
    assert engine.stats.prefetch_hits > engine.stats.prefetch_misses


def test_as_much_has_gone_out_as_has_come_back(small):
    engine = small.engine("raw")
    warm_up(small, engine)
    link_ = engine._state.lanes._only.executor.link
    for _ in range(2):
        packed, values = small.save(engine, N, NUMEL)
        before = link_.sources.nbytes  # a host that is ahead sees none of them read
        assert MIB < before <= 4 * MIB
        came = 0
        while packed:
            came += packed[-1].region.source is None
            back = engine.unpack(packed.pop())
            small.use(back)
            assert torch.equal(back, values.pop())
            del back
            assert link_.sources.came_bytes == came * MIB
            assert link_.sources.nbytes <= max(0, before - came * MIB)
        assert N - 4 <= came < N
        engine._end_backward()
        engine.begin_step()


@pytest.mark.usefixtures("much")
def test_memory_that_was_wanted_early_goes_with_its_tensor(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine)
    packed, values = machine.save(engine, N, NUMEL)
    link_ = engine._state.lanes._only.executor.link
    for n in range(N):
        assert torch.equal(engine.unpack(packed.pop()), values.pop())
        machine.cuda.synchronize()  # all have been read: but for the next ones, they go
        link_.pump()
        assert link_.device_bytes <= (N - 1 - n) * MIB


@pytest.mark.usefixtures("much")
def test_a_region_whose_last_tensor_was_wanted_early_holds_the_next_one_until_it_is_read(machine):
    engine = machine.engine("raw")
    warm_up(machine, engine, 1)
    (packed,), (value,) = machine.save(engine, 1, NUMEL)
    region, link_ = packed.region, engine._state.lanes._only.executor.link
    region.wanted = True
    machine.cuda.synchronize()
    link_.pump()
    assert region.source is not None
    del packed
    with link_._lock:  # as if it died in another thread, while dead ones are released
        link_._free(region)
        region.source, region.wanted = value, False
        link_.sources.let_go(MIB)
        assert region.source is value
        region.source = None


@pytest.mark.parametrize("progress", [0, 40, None], ids=["none", "some", "all"])
def test_a_graph_that_is_dropped_gives_everything_back(small, progress, codec):
    engine = small.engine(codec)
    warm_up(small, engine)
    packed, _ = small.save(engine, N, NUMEL)
    if progress is None:
        small.cuda.synchronize()
    else:
        small.cuda.run_some(progress)
    engine.unpack(packed.pop())  # and some are brought back ahead
    assert are_copied(packed)
    packed.clear()
    engine.collect()
    assert_nothing_is_held(small, engine)


def test_no_memory_ahead_of_the_use_is_counted_and_costs_a_miss(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine, 4)
    packed, values = machine.save(engine, 4, NUMEL)
    machine.cuda.synchronize()
    machine.cuda.failures = [0, 0]  # of the first one ahead, and of its second try
    ask_all(machine, engine, packed, values)
    assert engine.stats.fallbacks_by_reason == {"prefetch": 1}
    assert_nothing_is_held(machine, engine)


def test_no_memory_for_a_tensor_that_is_asked_for_raises(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine, 1)
    packed, values = machine.save(engine, 1, NUMEL)
    engine.synchronize()
    machine.cuda.failures = [0, 0]
    with pytest.raises(MemoryError):
        engine.unpack(packed[0])
    assert torch.equal(engine.unpack(packed[0]), values[0])
    packed.clear()
    assert_nothing_is_held(machine, engine)


def test_a_copy_that_cannot_be_issued_goes_the_whole_way(machine, monkeypatch):
    engine = machine.engine("raw")
    warm_up(machine, engine, 1)

    streams = engine._state.lanes._only.executor.link._streams
    memcpy = streams.memcpy

    def fails_once(*_):
        streams.memcpy = memcpy
        raise RuntimeError("no copy")

    streams.memcpy = fails_once
    packed, values = machine.save(engine, 1, NUMEL)
    assert type(packed[0]) is PackedView
    ask_all(machine, engine, packed, values)
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_a_budget_holds_in_steps_of_slots(machine, codec):
    one = 4 * NUMEL
    machine.device.backlog_bytes = machine.device.ready_bytes = 1 << 30
    engine = machine.engine(codec, budget=8 * one)
    for _ in range(2):
        warm_up(machine, engine, 2 * N)
    kept_bytes = engine.stats.kept_bytes_by_reason["budget"]
    packed, values = machine.save(engine, 2 * N, NUMEL)
    kept_bytes = engine.stats.kept_bytes_by_reason["budget"] - kept_bytes
    leaving = [p for p in packed if type(p) is Away]
    assert len(leaving) == 2 * N - kept_bytes // one
    assert 4 * one < kept_bytes <= 8 * one
    rings = 4 * one * (codec != "raw")
    assert machine.cuda.peak_bytes <= 8 * one + rings
    machine.cuda.synchronize()
    engine._state.lanes.pump()
    machine.cuda.peak_bytes = 0
    ask_all(machine, engine, packed, values)
    assert machine.cuda.peak_bytes <= 4 * one + rings + one * (codec != "raw")


def test_the_memory_that_a_plan_was_made_for_is_held_after_the_model_has_changed(machine):
    machine.device.backlog_bytes = 1 << 30
    drifted = {i: Decision("swap", "raw", nbytes=7) for i in range(2 * N)}
    engine = machine.engine("raw", plan=Plan(drifted, budget_bytes=6 * MIB))
    for _ in range(3):
        warm_up(machine, engine, 2 * N)
    packed, _ = machine.save(engine, 2 * N, NUMEL)
    assert are_copied(packed)
    assert machine.cuda.peak_bytes <= 6 * MIB + MIB


@pytest.mark.parametrize("steps", [GENERAL_WAY, BY_SLOTS])
@pytest.mark.parametrize("ahead", [0, 2])
def test_a_second_stream_waits_for_memory_that_the_first_was_given(
    machine, monkeypatch, ahead, steps, codec
):
    look_every(monkeypatch, steps)
    monkeypatch.setattr("cswap.engine.unpacker._current_backward", lambda: 7)  # one runs
    engine = machine.engine(codec)
    engine._unpacker.backward = 7

    def forward():
        engine.begin_step()
        saved = []
        for i in range(4):
            x = result(machine.tensor(NUMEL, i))
            saved.append([engine.pack(x), engine.pack(x)])
            del x
        machine.cuda.synchronize()
        engine._state.lanes.pump()
        return saved

    for _ in range(2):
        for pair in forward()[::-1]:
            for one in pair[::-1]:
                engine.unpack(one)
        machine.cuda.synchronize()
        engine._end_backward()
    saved = forward()
    engine._state.lanes._only.ahead = ahead
    for one in saved.pop():
        engine.unpack(one)
    streams = machine.cuda.Stream(), machine.cuda.Stream()
    for stream in streams:  # as autograd does it: the stream of the forward is awaited
        stream.wait_event(machine.device.now().event)
    for stream, one in zip(streams, saved.pop()[::-1], strict=True):
        with machine.cuda.stream(stream):
            machine.use(engine.unpack(one))
    machine.cuda.synchronize()
    assert not machine.cuda.faults  # the fixture asks again, once all is gone
