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
from cswap.engine.link.way_back import WayBack
from cswap.engine.replay.link_slot import LinkSlot
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
    engine._state.lanes.pump()
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
        positions.append(region.owner().position)
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
    started.clear()
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
    started.clear()
    packed, values = machine.save(engine, 6, NUMEL)
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


@pytest.fixture
def stays_first(machine, started, monkeypatch):
    """A step whose backward asks for a parameter first; the positions that this has begun."""
    engine, weight = machine.engine("raw"), torch.nn.Parameter(torch.ones(4))
    machine.device.backlog_bytes = machine.device.ready_bytes = 2 * NUMEL * 4
    monkeypatch.setattr("cswap.engine.unpacker._current_backward", lambda: 7)  # one runs

    def step(order):
        engine.begin_step()
        packed, values = machine.save(engine, 4, NUMEL)
        copied, stays = are_copied(packed), engine.pack(weight)
        engine.synchronize()
        engine._unpacker.backward = 7
        started.clear()
        assert engine.unpack(stays) is weight
        began = list(started)
        for n in order:
            assert torch.equal(engine.unpack(packed[n]), values[n])
            packed[n] = None
        machine.cuda.synchronize()
        return began if copied else None, packed

    return engine, step


def test_the_first_tensors_come_back_while_those_that_stay_are_used(stays_first):
    engine, step = stays_first
    for order in ([3, 2, 1, 0], [2, 3, 1, 0], [2, 3, 1, 0]):
        began, _ = step(order)
        engine._end_backward()
    assert began == [2, 3]  # in the order of the step before
    for _ in range(6):
        found = [step(order)[0] for order in ([3, 2, 1, 0], [0, 1, 2, 3])]
    assert found == [[3, 2], [0, 1]]  # two losses take turns


def test_where_tensors_of_two_steps_are_away_none_is_begun_before_it_is_asked_for(stays_first):
    _engine, step = stays_first
    for _ in range(3):
        step([3, 2, 1, 0])
    _, never_asked = step([])
    found = [step([3, 2, 1, 0])[0] for _ in range(2)]
    assert found[-1] == []
    never_asked.clear()
    assert step([3, 2, 1, 0])[0] == [3, 2]


def test_tensors_that_were_begun_for_another_order_are_let_go(stays_first, started):
    engine, step = stays_first
    for _ in range(3):
        step([3, 2, 1, 0])
    link = engine._state.lanes.links[0]
    began, packed = step([0])
    assert began == [3, 2]
    assert started[2:] != []  # others have the room now
    held = [region.owner().position for region in link.alive if region.memory is not None]
    assert 3 not in held or 2 not in held
    packed.clear()
    for _ in range(3):
        step([3, 2, 1, 0])
    _, packed = step([3])
    assert link.ahead.nbytes > 0
    step([])  # nobody has asked for the rest of that graph
    assert link.ahead.nbytes == 0
    assert packed[2] is not None


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
    engine.counters.begin_backward()
    assert engine.unpack(packed).data_ptr() == x.data_ptr()
    assert engine.stats.kept_by_reason["wanted_early"] == 1
    machine.cuda.synchronize()
    engine.collect()
    assert engine.stats.step_plain_bytes == MIB  # though it is counted as gone, too
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
    engine._state.lanes.pump()  # its memory is let go
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
        engine._state.lanes.pump()
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
        engine._state.lanes.pump()
        engine._state.lanes.of(want.device).ahead = ahead
        ask_all(machine, engine, others, values)
        engine.unpack(packed.pop()).mul_(3.0)
        assert torch.equal(engine.unpack(packed.pop()), want)
        engine._end_backward()
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize(
    "options",
    [{"host_limit": 1 << 40}, {"host_limit": 4 * MIB}, {"spill_dir": ".", "host_limit": 0}],
    ids=["enough", "little", "disk"],
)
def test_a_tensor_for_which_the_host_has_no_room_goes_to_the_disk_or_stays(
    machine, options, tmp_path, codec
):
    if "spill_dir" in options:
        options = {**options, "spill_dir": tmp_path}
    engine = machine.engine(codec, **options)
    for _ in range(3):
        warm_up(machine, engine)
    packed, values = machine.save(engine, N, NUMEL)
    kinds = {type(p) for p in packed}
    assert Away in kinds
    assert (kinds == {Away}) is (options["host_limit"] != 4 * MIB)
    engine.synchronize()
    assert (engine.stats.disk_bytes > 0) is ("spill_dir" in options)
    ask_all(machine, engine, packed, values)
    engine.close()
    assert engine.stats.disk_bytes == 0


def test_tensors_that_are_verified_have_handles(machine, codec):
    engine = machine.engine(codec, verify=True)
    warm_up(machine, engine)
    packed, values = machine.save(engine, N, NUMEL)
    assert {type(p) for p in packed} == {PackedView}
    ask_all(machine, engine, packed, values)
    engine.close()


@pytest.mark.parametrize("agree", [True, False])
def test_where_values_must_agree_they_are_the_codecs_at_any_time(machine, monkeypatch, agree):
    monkeypatch.setattr("cswap.engine.link.link_way.must_agree", lambda *, lossy: agree)
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


def test_a_copy_back_of_an_encoding_that_fails_is_no_tensor(machine, monkeypatch):
    engine = machine.engine("zvc")
    warm_up(machine, engine, 2)
    packed, values = machine.save(engine, 1, NUMEL)
    engine.synchronize()
    with monkeypatch.context() as patch:
        patch.setattr(engine._state.lanes._only.executor.link._streams, "memcpy", fails)
        with pytest.raises(RuntimeError, match="on purpose"):
            engine.unpack(packed[0])
    assert torch.equal(engine.unpack(packed[0]), values[0])
    packed.clear()
    assert_nothing_is_held(machine, engine)


def fails(*_args, **_options):
    raise RuntimeError("on purpose")


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


@pytest.mark.parametrize("part_bytes", [None, MIB])
def test_a_tensor_is_rounded_as_on_the_whole_way(monkeypatch, part_bytes):
    """By its position, its part and the step."""
    found = []
    for steps in (GENERAL_WAY, BY_SLOTS):
        look_every(monkeypatch, steps)
        with monkeypatch.context() as patch:
            machine = LaggingMachine(patch)
            machine.device.part_bytes = part_bytes
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


def test_a_payload_that_is_late_is_copied_when_its_size_is_known(machine, monkeypatch):
    monkeypatch.setattr("cswap.codecs.tiled.TiledCodec.late_payload", True)
    engine = machine.engine("zvc")
    for _ in range(2):
        warm_up(machine, engine)
    packed, values = machine.save(engine, N, NUMEL)
    assert are_copied(packed)
    assert all(one.region.once for one in packed)
    ask_all(machine, engine, packed, values)
    machine.cuda.synchronize()
    assert_nothing_is_held(machine, engine)


@pytest.mark.parametrize("numel", [2 * NUMEL, 2 * NUMEL + 5])
def test_a_large_tensor_is_encoded_in_parts(machine, codec, numel):
    machine.device.part_bytes = MIB
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


# ------------------------------------------------------------------------- cost

MOST_CALLS = 32
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
    engine = SwapEngine(config, device=SimDevice(seed))
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
