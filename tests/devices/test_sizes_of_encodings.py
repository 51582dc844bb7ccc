"""Encodings of slots over a link that grow, fail, or have nowhere to go."""

from __future__ import annotations

import pytest

from cswap.engine.link import way_out
from cswap.engine.saved.packed import PackedView
from tests.devices.saved import assert_nothing_is_held
from tests.devices.test_link_slots import (
    MIB,
    NUMEL,
    N,
    are_copied,
    ask_all,
    codec,
    fails,
    machine,
    small,
    warm_up,
)

__all__ = ["codec", "machine", "small"]

pytestmark = pytest.mark.sampled


@pytest.mark.parametrize("round_trip", [False, True])
def test_the_tensor_of_an_encode_that_fails_stays_in_its_own_memory(small, monkeypatch, round_trip):
    engine = small.engine("zvc")
    warm_up(small, engine, 8)
    engine._replay.review()
    for slot in engine.packer.book.slots:
        slot.way.round_trip = round_trip  # its own memory does not serve, until it has to
    monkeypatch.setattr(way_out, "checked_size", fails)
    packed, values = small.save(engine, 8, NUMEL)
    assert are_copied(packed)
    engine._state.lanes._only.executor.link.let_go_down_to(
        MIB
    )  # the host waits for the sizes first
    ask_all(small, engine, packed, values)
    # Nobody has looked at the size of the last one, if its own memory serves.
    assert engine.stats.fallbacks_by_reason["zvc:encode"] == 7 + round_trip
    small.cuda.synchronize()
    assert_nothing_is_held(small, engine)


def grown(engine):
    """Let each slot believe that its encodings are a quarter of their size."""
    for slot in engine.packer.book.slots or engine._replay.review():
        slot.way.reserves = tuple(n // 4 for n in slot.way.reserves)
        slot.link.release(slot.way)


def test_an_encoding_that_outgrows_its_reserve_is_copied_whole(machine):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    grown(engine)
    packed, values = machine.save(engine, N, NUMEL)
    assert are_copied(packed)
    engine.synchronize()
    before = [slot.way.reserves for slot in engine.packer.book.slots]
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    engine._end_backward()
    engine.begin_step()
    engine._replay.review()
    after = [slot.way.reserves for slot in engine.packer.book.slots]
    assert all(a > b for (a,), (b,) in zip(after, before, strict=True))
    assert engine.stats.fallbacks == 0
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("dies", [False, True])
def test_where_the_host_has_no_memory_for_one_that_has_grown_it_stays_on_the_device(
    machine, monkeypatch, dies
):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    engine._replay.review()
    grown(engine)
    take = way_out.WayOut.borrow
    monkeypatch.setattr(  # but for those that the ways reserve
        way_out.WayOut, "borrow", lambda self, part, n: part.pending is None and take(self, part, n)
    )
    packed, values = machine.save(engine, N, NUMEL)
    if dies:
        packed.clear()
    engine.synchronize()
    engine.collect()
    assert (engine.stats.device_bytes > 0) is not dies
    assert dies or engine.stats.fallbacks_by_reason["host_limit"] > 0
    ask_all(machine, engine, packed, values if packed else [])
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


def test_where_the_host_has_no_memory_at_all_a_tensor_goes_the_whole_way(machine, monkeypatch):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    engine._replay.review()
    for slot in engine.packer.book.slots:
        slot.link.release(slot.way)
    monkeypatch.setattr(engine._state.lanes._only.host, "take", lambda *_: None)
    packed, values = machine.save(engine, N, NUMEL)
    assert {type(p) for p in packed} == {PackedView}
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


def test_an_encode_that_cannot_be_issued_goes_the_whole_way(machine, monkeypatch):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    monkeypatch.setattr("cswap.codecs.tiled.TiledCodec.encode_flat", fails)
    packed, values = machine.save(engine, N, NUMEL)
    assert {type(p) for p in packed} == {PackedView}
    ask_all(machine, engine, packed, values)  # raw
    assert engine.stats.fallbacks_by_reason["zvc:encode"] == N
    assert_nothing_is_held(machine, engine)


def test_an_encoding_that_cannot_be_made_again_leaves_its_tensor_where_it_is(machine, monkeypatch):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    engine._replay.review()
    grown(engine)
    streams = engine._state.lanes._only.executor.link._streams
    again, allocate = way_out.WayOut._encode_again, streams.allocate

    def without_memory(self, part, owner):
        streams.allocate = fails
        try:
            again(self, part, owner)
        finally:
            streams.allocate = allocate

    monkeypatch.setattr(way_out.WayOut, "_encode_again", without_memory)
    packed, values = machine.save(engine, N, NUMEL)
    engine.synchronize()
    assert not any(one.region.n_unsized for one in packed)
    assert all(one.region.stays for one in packed)
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


def test_a_storage_that_was_resized_meanwhile_is_not_encoded_again(machine):
    engine = machine.engine("zvc")
    warm_up(machine, engine, 1)
    engine._replay.review()
    grown(engine)
    packed, values = machine.save(engine, 1, NUMEL)
    packed[0].region.address += 8  # it has other memory than it had
    link_ = engine._state.lanes._only.executor.link
    link_.let_go_down_to(0)
    assert packed[0].region.stays
    ask_all(machine, engine, packed, values)
    assert engine.stats.fallbacks_by_reason["zvc:encode"] == 1
    assert_nothing_is_held(machine, engine)


def test_a_tensor_that_dies_before_its_size_is_known_leaves_nothing(machine):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    for _ in range(3):
        packed, _ = machine.save(engine, N, NUMEL)
        packed.clear()
        engine.begin_step()
    assert_nothing_is_held(machine, engine)
