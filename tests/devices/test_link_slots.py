"""Saved tensors that are copied over a link at a known place: they have no handle.

They run on `bench.twin.lagging_cuda`, which finds memory that is used too early.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest
import torch

from cswap.config import SwapConfig
from cswap.engine.engine import SwapEngine
from cswap.engine.replay import link, way_out
from cswap.engine.replay.link_slot import LinkSlot
from cswap.engine.replay.way_back import WayBack
from cswap.engine.saved.away import Away
from cswap.engine.saved.packed import PackedView
from cswap.engine.saved.without_handle import Again
from cswap.schema.plan import Decision, Plan
from tests.devices.lagging_machine import LaggingMachine
from tests.devices.saved import assert_nothing_is_held, result
from tests.devices.sim import SimDevice
from tests.engine.engines import assert_empty
from tests.engine.looks import look_every

MIB = 1 << 20
N = 12
NUMEL = MIB // 4
"""Elements of one MiB."""

GENERAL_WAY, BY_SLOTS = 1, 64
"""Values of `looks.EVERY`."""


@pytest.fixture
def machine(monkeypatch):
    made: Any = LaggingMachine(monkeypatch)
    yield made
    assert not made.cuda.faults, made.cuda.faults[:5]


pytestmark = pytest.mark.sampled


@pytest.fixture(params=["raw", "zvc"])
def codec(request):
    return request.param


@pytest.fixture
def small(machine):
    """A machine whose bounds are four tensors of one MiB."""
    machine.device.backlog_bytes = machine.device.ready_bytes = 4 * MIB
    return machine


def ask_all(machine, engine, packed, values):
    """Ask for the tensors, the last one first, as backward does."""
    while packed:
        back = engine.unpack(packed.pop())
        machine.use(back)
        assert torch.equal(back, values.pop())
        del back


def warm_up(machine, engine, n=N, numel=NUMEL):
    """A step in which the places become known; the next one begins."""
    engine.begin_step()
    packed, values = machine.save(engine, n, numel)
    engine.synchronize()
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    engine._end_backward()
    engine.begin_step()
    machine.cuda.peak_bytes = machine.cuda.allocated_bytes


def are_copied(packed):
    return all(type(p) is Away for p in packed)


# ---------------------------------------------------------------- out and back


def test_a_tensor_at_a_known_place_is_copied_out_and_back(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine)
    packed, values = machine.save(engine, N, NUMEL)
    assert are_copied(packed)
    engine.synchronize()
    ask_all(machine, engine, packed, values)
    stats = engine.stats
    assert stats.by_codec[codec].count == stats.swapped == 2 * N
    assert isinstance(engine.packer.book.begun.places[0].slot, LinkSlot)
    stands = [slot is not None for slot in engine.packer.book.slots]
    assert stands == N * [True]
    assert stats.fallbacks == 0
    assert_nothing_is_held(machine, engine)


def test_an_excluded_operators_tensor_stays_at_a_known_place(machine, codec):
    engine = machine.engine(codec, exclude="op:other")
    engine.scopes.operator = "one"
    warm_up(machine, engine)
    packed, values = machine.save(engine, N // 2, NUMEL)
    engine.scopes.operator = "other"
    mine, its_values = machine.save(engine, 1, NUMEL)
    engine.scopes.operator = "one"
    others, their_values = machine.save(engine, N // 2 - 1, NUMEL)
    assert [type(p) for p in (*packed, *mine)] == [*[Away] * (N // 2), PackedView]
    assert engine.stats.kept_by_reason == {"excluded": 1}
    packed, values = [*packed, *mine, *others], [*values, *its_values, *their_values]
    del mine, others
    engine.synchronize()
    ask_all(machine, engine, packed, values)
    assert engine.stats.swapped == 2 * N - 1
    assert_nothing_is_held(machine, engine)


def test_a_part_of_a_storage_that_is_no_view_comes_back_as_it_was(machine, codec):
    # As LSTM cells save them.
    engine = machine.engine(codec)
    warm_up(machine, engine)
    part = torch.unsafe_split(machine.tensor(2 * NUMEL, 0), NUMEL)[1]
    assert part._base is None
    value = part.clone()
    packed = engine.pack(part)
    del part
    back = engine.unpack(packed)
    machine.use(back)
    assert torch.equal(back, value)
    assert engine.stats.fallbacks == 0


def test_it_may_be_asked_for_several_times(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine, 3)
    packed, values = machine.save(engine, 3, NUMEL)
    assert are_copied(packed)
    for _ in range(3):
        for one, value in zip(packed[::-1], values[::-1], strict=True):
            assert torch.equal(engine.unpack(one), value)
        machine.cuda.synchronize()
    del one
    packed.clear()
    assert_nothing_is_held(machine, engine)


def test_all_are_brought_back_ahead_each_time_that_they_are_asked_for(small, codec):
    engine = small.engine(codec)
    warm_up(small, engine)
    packed, _ = small.save(engine, N, NUMEL)
    small.cuda.synchronize()
    small.device.pump()
    for _ in range(2):
        engine._unpacker._note_backward()
        for one in packed[::-1]:
            assert one is packed[-1] or one.region.ahead
            engine.unpack(one)
    del one
    packed.clear()
    assert_nothing_is_held(small, engine)


@pytest.fixture
def started(monkeypatch):
    """Positions of the tensors whose way back has begun, in order."""
    positions, start = [], WayBack.start

    def noting(self, region):
        positions.append(region.slot.position)
        return start(self, region)

    monkeypatch.setattr(WayBack, "start", noting)
    return positions


@pytest.mark.parametrize("planned", [0, 1, 3, None])
def test_a_way_back_begins_when_the_plan_says(machine, started, planned):
    """The tensors in between that stay count for the plan, and not for the slots."""
    swap, keep = Decision("swap", "raw", planned), Decision("keep")
    decisions = {n: swap if n % 2 == 0 else keep for n in range(12)}
    machine.device.backlog_bytes = machine.device.ready_bytes = 1 << 30
    engine = machine.engine("raw", plan=Plan(decisions, budget_bytes=1 << 30))
    warm_up(machine, engine, 12)
    packed, values = machine.save(engine, 12, NUMEL)
    assert are_copied(packed[::2])
    engine.synchronize()
    engine._unpacker._note_backward()
    for n in (11, 10):
        assert torch.equal(engine.unpack(packed[n]), values[n])
    n_ahead = 5 if planned is None else planned // 2
    assert started == [10, 8, 6, 4, 2, 0][: 1 + n_ahead]
    ask_all(machine, engine, packed[:10], values[:10])


def test_the_first_tensor_that_backward_asks_for_begins_what_the_plan_begins_there(
    machine, started, monkeypatch
):
    """It may be one that stays."""
    swap = Decision("swap", "raw", 2)
    decisions = {n: swap if n < 4 else Decision("keep") for n in range(6)}
    engine = machine.engine("raw", plan=Plan(decisions, budget_bytes=1 << 30))
    warm_up(machine, engine, 6)
    packed, values = machine.save(engine, 6, NUMEL)
    assert not engine.may_be_quiet  # or nobody would tell
    engine.synchronize()
    monkeypatch.setattr("cswap.engine.unpacker._current_backward", lambda: 7)  # one runs
    engine._unpacker.backward = 7
    engine.unpack(packed[5])
    assert started == [3]
    engine.unpack(packed[4])
    assert started == [3]
    assert torch.equal(engine.unpack(packed[3]), values[3])
    assert started == [3, 2, 1]
    ask_all(machine, engine, packed[:3], values[:3])


def test_a_tensor_that_is_to_wait_does_not_keep_the_next_ones(machine, started):
    ahead = {n: 1 if n in (4, 5) else 4 for n in range(8)}
    decisions = {n: Decision("swap", "raw", many) for n, many in ahead.items()}
    machine.device.backlog_bytes = machine.device.ready_bytes = 1 << 30
    engine = machine.engine("raw", plan=Plan(decisions, budget_bytes=1 << 30))
    warm_up(machine, engine, 8)
    packed, values = machine.save(engine, 8, NUMEL)
    engine.synchronize()
    engine._unpacker._note_backward()
    expected = [[7, 6, 3], [5, 2], [4, 1], [0], [], [], [], []]
    for n in range(7, -1, -1):
        started.clear()
        assert torch.equal(engine.unpack(packed[n]), values[n])
        assert started == expected[7 - n]


def test_a_tensor_that_is_wanted_early_is_its_own_memory(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine, 1)
    x = machine.tensor(NUMEL)
    packed = engine.pack(x)
    assert type(packed) is Away
    assert engine.unpack(packed).data_ptr() == x.data_ptr()
    assert engine.stats.kept_by_reason["wanted_early"] == 1
    machine.cuda.synchronize()
    engine.collect()
    assert engine.unpack(packed).data_ptr() != x.data_ptr()
    del packed, x
    assert_nothing_is_held(machine, engine)


def test_a_tensor_that_was_modified_raises(machine, codec):
    engine = machine.engine(codec)
    warm_up(machine, engine, 2)
    x, y = machine.tensor(NUMEL), machine.tensor(NUMEL)
    early, late = engine.pack(x), engine.pack(y)
    x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.unpack(early)
    machine.cuda.synchronize()
    machine.device.pump()  # its memory is let go
    y.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        engine.unpack(late)
    del early, late, x, y
    assert_nothing_is_held(machine, engine)


def test_a_tensor_that_is_saved_twice_is_copied_once(machine, codec):
    engine = machine.engine(codec)

    def step():
        engine.begin_step()
        x = result(machine.tensor(NUMEL))
        packed = [engine.pack(x), engine.pack(x.view(2, -1))]
        want = x.detach().clone()
        del x
        machine.cuda.synchronize()
        machine.device.pump()
        kinds = [type(p) for p in packed]
        assert torch.equal(engine.unpack(packed.pop()), want.view(2, -1))
        assert torch.equal(engine.unpack(packed.pop()), want)
        engine._end_backward()
        return kinds

    kinds = [step() for _ in range(4)]
    assert kinds[0] == [PackedView, PackedView]
    assert kinds[-1] == [Away, Again]
    stats = engine.stats
    assert (stats.packed, stats.swapped, stats.deduplicated) == (8, 4, 4)
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("ahead", [0, 8])
@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_a_user_that_writes_into_its_tensor_changes_no_other_users(machine, codec, ahead):
    engine = machine.engine(codec)
    for _ in range(4):
        engine.begin_step()
        x = result(machine.tensor(NUMEL))
        packed = [engine.pack(x), engine.pack(x.view(2, -1))]
        others, values = machine.save(engine, 2, NUMEL)
        want = x.detach().clone()
        del x
        machine.cuda.synchronize()
        machine.device.pump()
        engine._state.lanes.of(want.device).ahead = ahead
        ask_all(machine, engine, others, values)
        engine.unpack(packed.pop()).mul_(3.0)
        assert torch.equal(engine.unpack(packed.pop()), want)
        engine._end_backward()
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("options", [{"host_limit": 1 << 40}, {"spill_dir": "."}, {"verify": True}])
def test_where_a_tensor_may_go_elsewhere_it_has_a_handle(machine, options, tmp_path, codec):
    if "spill_dir" in options:
        options = {"spill_dir": tmp_path}
    engine = machine.engine(codec, **options)
    warm_up(machine, engine)
    packed, values = machine.save(engine, N, NUMEL)
    assert {type(p) for p in packed} == {PackedView}
    ask_all(machine, engine, packed, values)
    engine.close()


@pytest.mark.parametrize("agree", [True, False])
def test_where_values_must_agree_they_are_the_codecs_at_any_time(machine, monkeypatch, agree):
    monkeypatch.setattr("cswap.engine.replay.link_slot.must_agree", lambda *, lossy: agree)
    engine = machine.engine("int8")
    engine.begin_step()
    packed, values = machine.save(engine, N, NUMEL)
    while packed:
        engine.unpack(packed.pop())
    engine.begin_step()
    packed, values = machine.save(engine, N, NUMEL)
    assert are_copied(packed)
    exact = []
    while packed:
        back, value = engine.unpack(packed.pop()), values.pop()
        assert torch.allclose(back, value, atol=0.1)
        exact.append(torch.equal(back, value))
        del back
    assert exact[0] is not agree  # it has not left when it is asked for
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("round_trip", [False, True])
def test_the_tensor_of_an_encode_that_fails_stays_in_its_own_memory(small, monkeypatch, round_trip):
    engine = small.engine("zvc")
    warm_up(small, engine, 8)
    engine.review_slots()
    for slot in engine.packer.book.slots:
        slot.round_trip = round_trip  # its own memory does not serve, until it has to
    monkeypatch.setattr(way_out, "checked_size", fails)
    packed, values = small.save(engine, 8, NUMEL)
    assert are_copied(packed)
    engine._state.lanes._only.executor.let_go_down_to(MIB)  # the host waits for the sizes first
    ask_all(small, engine, packed, values)
    # Nobody has looked at the size of the last one, if its own memory serves.
    assert engine.stats.fallbacks_by_reason["zvc:encode"] == 7 + round_trip
    small.cuda.synchronize()
    assert_nothing_is_held(small, engine)


def test_a_copy_back_of_an_encoding_that_fails_is_no_tensor(machine, monkeypatch):
    engine = machine.engine("zvc")
    warm_up(machine, engine, 2)
    packed, values = machine.save(engine, 1, NUMEL)
    engine.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr("cswap.devices.base.copy_bytes", fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.unpack(packed[0])
    assert torch.equal(engine.unpack(packed[0]), values[0])
    packed.clear()
    assert_nothing_is_held(machine, engine)


def grown(engine):
    """Let each slot believe that its encodings are a quarter of their size."""
    for slot in engine.packer.book.slots or engine._replay.review(saving=True):
        slot.reserves = tuple(n // 4 for n in slot.reserves)
        slot.link.release(slot)


def test_an_encoding_that_outgrows_its_reserve_is_copied_whole(machine):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    grown(engine)
    packed, values = machine.save(engine, N, NUMEL)
    assert are_copied(packed)
    engine.synchronize()
    before = [slot.reserves for slot in engine.packer.book.slots]
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    engine._end_backward()
    engine.begin_step()
    engine.review_slots()
    after = [slot.reserves for slot in engine.packer.book.slots]
    assert all(a > b for (a,), (b,) in zip(after, before, strict=True))
    assert engine.stats.fallbacks == 0
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("dies", [False, True])
def test_where_the_host_has_no_memory_for_one_that_has_grown_it_stays_on_the_device(
    machine, monkeypatch, dies
):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    engine.review_slots()
    grown(engine)
    monkeypatch.setattr(way_out.WayOut, "_borrow", lambda *_: False)
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
    engine.review_slots()
    for slot in engine.packer.book.slots:
        slot.link.release(slot)
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


def fails(*_args, **_options):
    raise RuntimeError("on purpose")


def test_an_encoding_that_cannot_be_made_again_leaves_its_tensor_where_it_is(machine, monkeypatch):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    engine.review_slots()
    grown(engine)
    streams = engine._state.lanes._only.executor.link._streams
    make_room, memcpy = way_out.WayOut._make_room, streams.memcpy

    def without_copies(self, part, nbytes):
        streams.memcpy = fails
        try:
            make_room(self, part, nbytes)
        finally:
            streams.memcpy = memcpy

    monkeypatch.setattr(way_out.WayOut, "_make_room", without_copies)
    packed, values = machine.save(engine, N, NUMEL)
    engine.synchronize()
    assert not any(one.region.n_unsized for one in packed)
    assert all(one.region.stays for one in packed)
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("has_host", [False, True])
def test_an_encoding_may_grow_twice(machine, monkeypatch, has_host):
    engine = machine.engine("zvc")
    warm_up(machine, engine, 1)
    engine.review_slots()
    grown(engine)
    packed, values = machine.save(engine, 1, NUMEL)
    link_ = engine._state.lanes._only.executor.link
    with monkeypatch.context() as patch:
        patch.setattr(way_out.WayOut, "_borrow", lambda *_: False)
        machine.cuda.synchronize()
        link_.out.look()
    part = packed[0].region.parts[0]
    part.kept = part.kept[:256]  # as if the first encoding had been as small as that
    packed[0].region.held_bytes -= link_.device_bytes - NUMEL * 4 - 256
    if not has_host:
        monkeypatch.setattr(way_out.WayOut, "_borrow", lambda *_: False)
    link_.let_go_down_to(0)
    assert (part.kept is None) is has_host
    assert link_.device_bytes == (0 if part.kept is None else part.kept.numel())
    ask_all(machine, engine, packed, values)


def test_a_storage_that_was_resized_meanwhile_is_not_encoded_again(machine):
    engine = machine.engine("zvc")
    warm_up(machine, engine, 1)
    engine.review_slots()
    grown(engine)
    packed, values = machine.save(engine, 1, NUMEL)
    packed[0].region.address += 8  # it has other memory than it had
    link_ = engine._state.lanes._only.executor.link
    link_.let_go_down_to(0)
    assert packed[0].region.stays
    ask_all(machine, engine, packed, values)
    assert engine.stats.fallbacks_by_reason["zvc:encode"] == 1
    assert_nothing_is_held(machine, engine)


def test_tensors_that_have_to_be_rounded_count_once_while_they_leave(small):
    engine = small.engine("int8")
    engine.begin_step()
    packed, _ = small.save(engine, 16, NUMEL)
    while packed:
        engine.unpack(packed.pop())
    engine._end_backward()
    engine.begin_step()
    engine.review_slots()
    for slot in engine.packer.book.slots:
        slot.round_trip = True
    sources = engine._state.lanes._only.executor.link.sources
    packed, _ = small.save(engine, 16, NUMEL)
    assert are_copied(packed)
    while packed:
        engine.unpack(packed.pop())
        assert sources.asked_bytes == sum(r.slot.nbytes for r in sources._regions if r.asked)
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
        own = sum(r.slot.nbytes for r in sources._regions if r.asked)
        assert sources.asked_bytes == own
        bounds.append((link_._ahead_bytes + own // 2, own))
    assert max(own for _, own in bounds) >= MIB
    assert max(both for both, _ in bounds) <= link_._most_ahead
    engine._end_backward()
    small.cuda.synchronize()
    assert_nothing_is_held(small, engine)
    assert link_.sources.asked_bytes == 0


def test_a_tensor_that_dies_before_its_size_is_known_leaves_nothing(machine):
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    for _ in range(3):
        packed, _ = machine.save(engine, N, NUMEL)
        packed.clear()
        engine.begin_step()
    assert_nothing_is_held(machine, engine)


def test_a_tensor_of_another_role_at_the_same_place_is_not_rounded(machine):
    engine = machine.engine("int8")
    kinds = []
    for step in range(4):
        engine.begin_step()
        x = result(machine.tensor(NUMEL, step).view(512, -1))
        y = torch.softmax(x, -1) if step == 3 else x  # exact, whatever the codec
        value = y.detach().clone()
        packed = engine.pack(y)
        kinds.append(type(packed))
        del x, y
        engine.synchronize()
        back = engine.unpack(packed)
        assert torch.equal(back, value) is (step == 3)
        del packed, back
        machine.cuda.synchronize()
        engine._end_backward()
    assert kinds == [PackedView, Away, Away, PackedView]
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("section_bytes", [None, MIB])
def test_a_tensor_is_rounded_as_on_the_whole_way(monkeypatch, section_bytes):
    """By its position, its part and the step."""
    found = []
    for steps in (GENERAL_WAY, BY_SLOTS):
        look_every(monkeypatch, steps)
        with monkeypatch.context() as patch:
            machine = LaggingMachine(patch)
            machine.device.section_bytes = section_bytes
            engine = machine.engine("int8")
            backs = []
            for _ in range(3):
                engine.begin_step()
                packed, _ = machine.save(engine, 3, 2 * NUMEL)
                engine.synchronize()
                backs += [engine.unpack(one).clone() for one in packed]
                kind = type(packed.pop())
                packed.clear()
                machine.cuda.synchronize()
                engine._end_backward()
            assert kind is (PackedView if steps == GENERAL_WAY else Away)
            found.append(backs)
    assert all(map(torch.equal, *found))


def test_conjugated_tensors_have_handles(machine):
    """Their memory has other numbers."""
    engine = machine.engine("raw")
    for _ in range(3):
        engine.begin_step()
        x = machine.tensor(NUMEL, 0, torch.complex64)
        x.mul_(1 + 2j)
        packed, value = engine.pack(x.conj()), x.conj().clone()
        del x
        engine.synchronize()
        assert torch.equal(engine.unpack(packed), value)
        assert type(packed) is PackedView
        del packed
        machine.cuda.synchronize()
        engine._end_backward()
    assert_nothing_is_held(machine, engine)


def test_codecs_whose_payload_is_late_have_handles(machine, monkeypatch):
    monkeypatch.setattr("cswap.codecs.tiled.TiledCodec.late_payload", True)
    engine = machine.engine("zvc")
    warm_up(machine, engine)
    packed, values = machine.save(engine, N, NUMEL)
    assert {type(p) for p in packed} == {PackedView}
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("numel", [2 * NUMEL, 2 * NUMEL + 5])
def test_a_large_tensor_is_encoded_in_parts(machine, codec, numel):
    machine.device.section_bytes = MIB
    engine = machine.engine(codec)
    warm_up(machine, engine, 3, numel)
    packed, values = machine.save(engine, 3, numel)
    assert are_copied(packed)
    n_parts = 1 if codec == "raw" else -(-numel // NUMEL)
    assert {len(p.region.parts) for p in packed} == {n_parts}
    engine.synchronize()
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


def test_a_view_of_a_large_part_of_its_storage_comes_back_with_the_rest(machine, codec):
    """As attention saves the queries of a projection, and then the keys."""
    engine = machine.engine(codec)
    for _ in range(4):
        engine.begin_step()
        base = result(machine.tensor(3 * NUMEL))
        parts = base.view(-1, 3, 64).unbind(1)[::-1]  # the first one is not at the begin
        values = [part.detach().clone() for part in parts]
        packed = [engine.pack(part) for part in parts]
        del base, parts
        engine.synchronize()
        kinds = [type(p) for p in packed]
        while packed:
            back = engine.unpack(packed.pop())
            machine.use(back)
            assert torch.equal(back, values.pop())
            del back
        machine.cuda.synchronize()
        engine._end_backward()
    assert kinds == [Away, Again, Again]
    assert engine.stats.swapped == 4
    assert_nothing_is_held(machine, engine)


def test_a_traced_step_and_a_captured_one_go_the_whole_way(machine):
    engine = machine.engine("raw")
    warm_up(machine, engine, 2)
    with engine.trace():
        assert type(engine.pack(machine.tensor(NUMEL))) is PackedView
    machine.cuda.capturing = True
    assert not isinstance(engine.pack(machine.tensor(NUMEL)), (Away, PackedView))
    machine.cuda.capturing = False


def test_statistics_are_those_of_the_whole_way(monkeypatch):
    found = []
    for steps in (GENERAL_WAY, BY_SLOTS):
        look_every(monkeypatch, steps)
        with monkeypatch.context() as patch:
            machine = LaggingMachine(patch)
            machine.device.backlog_bytes = machine.device.ready_bytes = 4 * MIB
            engine = machine.engine("raw")
            for _ in range(4):
                engine.begin_step()
                packed, values = machine.save(engine, N, NUMEL)
                engine.synchronize()
                ask_all(machine, engine, packed, values)
                machine.cuda.synchronize()
                engine._end_backward()
            s, c = engine.stats, engine.stats.by_codec["raw"]
            counts = (s.packed, s.swapped, s.prefetch_hits)
            found.append((*counts, s.peak_device_bytes, s.peak_host_bytes, c.count, c.encoded))
            assert_nothing_is_held(machine, engine)
            assert not machine.cuda.faults
    assert found[0] == found[1]


# ------------------------------------------------------------- bounds of memory


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
    machine.device.pump()
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

    def fails(*_):
        raise RuntimeError("no copy")

    monkeypatch.setattr("cswap.devices.base.copy_bytes", fails)
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
    machine.device.pump()
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
        machine.device.pump()
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
        stream.wait_event(machine.device.now().recorded)
    for stream, one in zip(streams, saved.pop()[::-1], strict=True):
        with machine.cuda.stream(stream):
            machine.use(engine.unpack(one))
    machine.cuda.synchronize()
    assert not machine.cuda.faults  # the fixture asks again, once all is gone


# ------------------------------------------------------------------------- cost

MOST_CALLS = 26
"""Python calls of cswap for a tensor, out, back and released, in all threads.

Lower this when the way gets shorter."""


def test_python_calls_of_a_tensor(machine):
    engine = machine.engine("raw")
    calls = 0

    def note(frame, event, _argument):
        nonlocal calls
        path = frame.f_code.co_filename
        calls += event == "call" and "/cswap/" in path and "/testing/" not in path

    for _ in range(2):  # by then its region has been made
        warm_up(machine, engine, 4 * N)
    before = sys.getprofile()
    sys.setprofile(note)  # the stand-in has no other threads
    try:
        ask_all(machine, engine, *machine.save(engine, 4 * N, NUMEL))
        machine.cuda.synchronize()
        engine.collect()
    finally:
        sys.setprofile(before)
    assert engine.stats.swapped == 4 * 3 * N
    assert calls / (4 * N) <= MOST_CALLS, calls / (4 * N)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("codec", ["raw", "zvc"])
def test_copies_that_end_in_any_order(seed, codec):
    config = SwapConfig(codec=codec, min_bytes=0, remat=False)
    engine = SwapEngine(config, device=SimDevice(seed, eager=True))
    x = torch.randn(64, 64, requires_grad=True)

    def gradient():
        y = x
        for _ in range(5):
            y = (y * 1.0).sin()
        return torch.autograd.grad(y.sum(), x)[0]

    wanted = gradient()
    for _ in range(6):
        engine.begin_step()
        with torch.autograd.graph.saved_tensors_hooks(engine.pack, engine.unpack):
            assert torch.equal(gradient(), wanted)
    assert_empty(engine)
