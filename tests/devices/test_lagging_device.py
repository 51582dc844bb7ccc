"""The engine on a device that runs only when the test, or a wait of the host, lets it run.

`bench.twin.lagging_cuda` watches that no memory is used again, read or written too early.
"""

from __future__ import annotations

import random
import threading

import pytest
import torch

from cswap.engine.link import link
from cswap.engine.link.way_back import WayBack
from cswap.schema.plan import Decision, Plan
from cswap.stores.disk import DiskStore
from tests.devices.lagging_machine import LaggingMachine
from tests.engine.looks import look_every

MIB = 1 << 20
N_TENSORS = 48


@pytest.fixture
def machine(monkeypatch):
    made = LaggingMachine(monkeypatch)
    made.device.backlog_bytes = 4 * MIB
    made.device.ready_bytes = 4 * MIB
    yield made
    assert not made.cuda.faults, made.cuda.faults[:5]


# ------------------------------------------------------- the stand-in finds faults


def test_memory_that_is_let_go_too_early_is_found(monkeypatch):
    machine = LaggingMachine(monkeypatch)
    x = machine.tensor(64)
    side = machine.cuda.Stream()
    with machine.cuda.stream(side):
        machine.use(x)
    del x
    assert any("reuse after a free" in fault for fault in machine.cuda.faults)
    assert any("does not wait for the operator" in fault for fault in machine.cuda.faults)


def test_what_is_ordered_by_events_is_no_fault(monkeypatch):
    machine = LaggingMachine(monkeypatch)
    x = machine.tensor(64)
    side = machine.cuda.Stream()
    written = machine.device.now()
    side.wait_event(written.event)
    with machine.cuda.stream(side):
        machine.use(x)
        read = machine.device.now()
    machine.device.join(read)
    del x
    assert machine.cuda.faults == []


# ------------------------------------------------------------- bounds of memory


@pytest.mark.parametrize("codec", ["raw", "zvc", "int8"])
def test_sources_under_way_are_bounded_while_the_device_stands_still(machine, codec):
    engine = machine.engine(codec)
    held = []
    for i in range(N_TENSORS):
        packed = engine.pack(machine.tensor(MIB // 4, i))
        held.append(packed)
    # tensors that wait for their encode or copy, and the encoders' memory
    assert machine.cuda.peak_bytes <= 2 * machine.device.backlog_bytes + 3 * MIB


@pytest.mark.parametrize("codec", ["raw", "zvc", "int8"])
def test_in_backward_a_result_goes_with_its_user_whatever_the_device_has_done(machine, codec):
    engine = machine.engine(codec)
    packed, values = machine.save(engine, N_TENSORS, MIB // 4)
    engine.synchronize()
    machine.cuda.peak_bytes = machine.cuda.allocated_bytes
    waits = machine.cuda.waits
    while packed:
        back = engine.unpack(packed.pop())
        machine.use(back)
        if codec != "int8":
            assert torch.equal(back, values.pop())
        del back
    assert machine.cuda.peak_bytes <= (
        machine.device.ready_bytes + machine.device.backlog_bytes + 3 * MIB
    )
    assert machine.cuda.waits == waits  # the host has not waited for the device


@pytest.mark.parametrize("codec", ["raw", "zvc", "int8"])
def test_a_large_device_holds_no_more_of_a_small_step(machine, codec):
    """By the device alone, all of this step could be under way, and all of it decoded ahead."""
    machine.device.backlog_bytes = machine.device.ready_bytes = 1 << 30
    engine = machine.engine(codec)
    for _ in range(2):
        engine.begin_step()
        packed, _ = machine.save(engine, N_TENSORS, MIB // 4)
        under_way = 3 * MIB  # three tensors, and 1/16 of the step
        assert machine.cuda.peak_bytes <= 2 * under_way + 3 * MIB
        engine.synchronize()
        machine.cuda.peak_bytes = machine.cuda.allocated_bytes
        while packed:
            back = engine.unpack(packed.pop())
            machine.use(back)
            del back
        assert machine.cuda.peak_bytes <= 2 * under_way + 3 * MIB
        machine.cuda.synchronize()
        engine._end_backward()
        machine.cuda.peak_bytes = machine.cuda.allocated_bytes


@pytest.mark.parametrize("steps", [1, 64])
def test_a_step_of_many_small_tensors_has_a_share_of_its_bytes_under_way(
    machine, monkeypatch, steps
):
    look_every(monkeypatch, steps)  # 1: all have handles
    machine.device.backlog_bytes = machine.device.ready_bytes = 1 << 30
    engine = machine.engine("raw")
    of_link = engine._state.lanes.of(machine.tensor(1).device).executor.link
    for _ in range(3):
        engine.begin_step()
        packed, _ = machine.save(engine, 10 * link.STEP_SHARE, 1024)
        packed.clear()
        engine.synchronize()
        engine.collect()
    engine.begin_step()
    engine._replay.review()
    assert of_link.sources.most_bytes == 10 * 4096


def test_a_plan_lets_more_be_under_way_than_the_device_does_itself(machine):
    engine = machine.engine("raw")
    link = engine._state.lanes.of(machine.tensor(1).device).executor.link
    bounds, most_held = [], []
    for planned in (0, 0, 8 * MIB, 0):  # the first tensors have no slots
        engine.plan_copies(planned)
        engine.begin_step()
        machine.cuda.peak_bytes = machine.cuda.allocated_bytes
        packed, values = machine.save(engine, N_TENSORS, MIB // 4)
        most_held.append(machine.cuda.peak_bytes)
        bounds.append((link.sources.most_bytes, link.ahead.most_bytes))
        while packed:
            assert machine.same(engine.unpack(packed.pop()), values.pop())
        machine.cuda.synchronize()
        engine._end_backward()
    assert bounds[1] == bounds[3] < bounds[2] == (8 * MIB, 8 * MIB)
    assert most_held[1] == most_held[3] < most_held[2]  # or the bound does nothing


@pytest.mark.parametrize("codec", ["zvc", "int8"])
def test_a_tensor_that_dies_while_its_copy_is_ordered_leaves_no_host_memory(machine, codec):
    engine = machine.engine(codec)
    packed = [engine.pack(machine.tensor(MIB // 4))]
    machine.drop_in_take(engine, packed)
    engine.synchronize()
    engine._state.lanes.pump()
    engine.collect()
    assert engine.stats.host_bytes == 0
    assert engine._state.lanes._only.host.in_use_bytes == 0


def test_what_is_fetched_ahead_before_its_size_is_known_comes_back(machine):
    engine = machine.engine("zvc", budget=4096)  # two stay, the others' memory is let go at once
    packed, values = machine.save(engine, 6, 512)
    while packed:  # the first asks for the others, too
        assert torch.equal(engine.unpack(packed.pop()), values.pop())
    assert engine.stats.fallbacks == 0


def test_raw_alone_has_its_dead_buried(machine):
    engine = machine.engine("raw")
    packed, _ = machine.save(engine, 8, MIB // 4)
    engine.synchronize()
    packed.clear()
    engine.collect()
    stats = engine.stats
    assert (stats.device_bytes, stats.host_bytes) == (0, 0)


def test_room_is_made_before_each_section(machine):
    machine.device.part_bytes = MIB
    engine = machine.engine("zvc")
    x = machine.tensor(N_TENSORS * MIB // 4)
    want = x.clone()
    before = machine.cuda.allocated_bytes
    packed = engine.pack(x)
    assert machine.cuda.peak_bytes - before <= machine.device.backlog_bytes + 2 * MIB
    del x
    engine.synchronize()
    machine.cuda.peak_bytes = machine.cuda.allocated_bytes
    assert torch.equal(engine.unpack(packed), want)
    assert machine.cuda.peak_bytes - before <= machine.device.backlog_bytes + 3 * MIB


def test_out_of_memory_finishes_what_is_under_way_and_buries_the_dead(machine, monkeypatch):
    engine = machine.engine("raw")
    packed, _ = machine.save(engine, 3, MIB // 4)
    packed.clear()
    held = machine.cuda.allocated_bytes
    assert held >= 3 * MIB
    seen = []

    machine.cuda.failures = [0]
    real = machine.cuda.empty_cache

    def empty_cache():
        seen.append(machine.cuda.allocated_bytes)
        real()

    monkeypatch.setattr(machine.cuda, "empty_cache", empty_cache)
    machine.device.allocate((10,), (1,), dtype=torch.float32)
    assert seen == [0]  # all of it had been given back before the second try


def test_a_budget_is_held_by_waiting_on_the_device(machine):
    engine = machine.engine("raw", budget=2 * MIB)
    packed, _ = machine.save(engine, N_TENSORS, MIB // 4)
    assert machine.cuda.peak_bytes <= 2 * MIB + 2 * MIB
    machine.cuda.peak_bytes = machine.cuda.allocated_bytes
    while packed:
        back = engine.unpack(packed.pop())
        machine.use(back)
        del back
    assert machine.cuda.peak_bytes <= 2 * MIB + 2 * MIB


def test_the_memory_that_a_plan_was_made_for_is_held(machine):
    decisions = {i: Decision("swap", "raw", prefetch=N_TENSORS) for i in range(N_TENSORS)}
    machine.device.backlog_bytes = machine.device.ready_bytes = 1 << 30
    engine = machine.engine("raw", plan=Plan(decisions, budget_bytes=6 * MIB))
    packed, _ = machine.save(engine, N_TENSORS, MIB // 4)
    assert machine.cuda.peak_bytes <= 6 * MIB + MIB  # and the tensor that is being saved
    machine.cuda.synchronize()
    engine._state.lanes.pump()
    machine.cuda.peak_bytes = 0
    while packed:
        back = engine.unpack(packed.pop())
        machine.use(back)
        del back
    assert MIB < machine.cuda.peak_bytes <= 6 * MIB + MIB
    assert engine.stats.prefetch_hits > 0


def test_with_a_plan_the_tensor_that_is_wanted_now_is_first_on_the_link(machine, monkeypatch):
    decisions = {i: Decision("swap", "raw", prefetch=8) for i in range(8)}
    engine = machine.engine("raw", plan=Plan(decisions, budget_bytes=1 << 30))
    packed, values = machine.save(engine, 8, 1024)
    engine.synchronize()
    brought, start = [], WayBack.start

    def noting(self, region):
        brought.append(region.owner().position)
        return start(self, region)

    monkeypatch.setattr(WayBack, "start", noting)
    assert torch.equal(engine.unpack(packed[-1]), values[-1])
    assert brought == [7, 6, 5, 4, 3, 2, 1, 0]


def test_files_are_read_ahead_beside_the_computation(machine, tmp_path, monkeypatch):
    readers = set()
    real = DiskStore.read

    def read(store, file, target):
        readers.add(threading.current_thread().name)
        return real(store, file, target)

    monkeypatch.setattr(DiskStore, "read", read)
    engine = machine.engine("raw", host_limit=0, spill_dir=str(tmp_path))
    packed, values = machine.save(engine, 6, 1024)
    engine.synchronize()
    assert engine.stats.disk_bytes > 0
    while packed:
        assert torch.equal(engine.unpack(packed.pop()), values.pop())
    assert readers
    assert all("cswap-disk" in name for name in readers)


# ------------------------------------------------------------- random programs


class Program:
    """A random program of one engine; every value that comes back is compared."""

    CODECS = ("raw", "zvc", "expk", "rle")

    def __init__(self, machine, seed):
        self.random = random.Random(seed)
        self.machine = machine
        device = machine.device
        device.backlog_bytes = self.random.choice([0, 8192, 65536])
        device.ready_bytes = self.random.choice([4096, 1 << 20])
        device.part_bytes = self.random.choice([None, 2048])
        self.engine = machine.engine(
            self.random.choice(self.CODECS),
            keep_last=self.random.choice([0, 0, 2]),
            host_limit=self.random.choice([None, None, 20000]),
            budget=self.random.choice([None, None, 10000]),
        )
        self.other = machine.cuda.Stream()
        self.tensors, self.saved = [], []

    def run(self, n_steps):
        acts = (
            [self.make] * 3 + [self.pack] * 5 + [self.ask] * 4 + [self.drop] * 3
            + [self.forget, self.modify, self.progress, self.progress, self.step, self.settle]
        )  # fmt: skip
        for _ in range(n_steps):
            self.random.choice(acts)()
        self.tensors.clear()
        self.random.shuffle(self.saved)
        while self.saved:
            self.ask()
            self.drop()
        self.engine.synchronize()
        self.engine.collect()
        stats = self.engine.stats
        assert (stats.device_bytes, stats.host_bytes) == (0, 0)

    def make(self):
        self.tensors.append(
            self.machine.tensor(
                self.random.choice([64, 500, 1500, 3000]), self.random.randrange(99)
            )
        )

    def pack(self):
        if not self.tensors:
            return
        x = self.random.choice(self.tensors)
        kind = self.random.random()
        if kind < 0.1:  # an eighth of it, with gaps
            n = x.numel() // 16 * 16
            x = x[:n].view(16, -1)[:2, ::2]
        elif kind < 0.2:
            x = x[self.random.randrange(8) :: self.random.choice([1, 2])]
        self.saved.append([self.engine.pack(x), x.detach().clone(), x._version, x._base])
        if self.random.random() < 0.6:
            self.tensors = [y for y in self.tensors if y is not x and y is not x._base]

    def ask(self):
        if not self.saved:
            return
        packed, value, *_ = self.random.choice(self.saved)
        elsewhere = self.random.random() < 0.1
        self.machine.ask(self.engine, packed, value, self.other if elsewhere else None)

    def drop(self):
        if self.saved:
            self.saved.pop(self.random.randrange(len(self.saved)))

    def forget(self):
        if self.tensors:
            self.tensors.pop(self.random.randrange(len(self.tensors)))

    def modify(self):
        if self.tensors:
            # A side stream may be reading it. The tensor's swap is void then, and unpack raises.
            self.random.choice(self.tensors).add_(1)

    def progress(self):
        self.machine.cuda.run_some(self.random.randrange(60))

    def step(self):
        self.engine.begin_step()

    def settle(self):
        self.engine.synchronize()


FEW = (*range(40), 643)  # some have found faults
MANY = range(40, 3000)


@pytest.mark.parametrize(
    "seeds", [FEW, pytest.param(MANY, marks=pytest.mark.slow)], ids=["few", "many"]
)
def test_random_programs_on_a_lagging_device(monkeypatch, seeds):
    monkeypatch.setattr("cswap.engine.link.link_way.PART_ALIGN", 64)
    for seed in seeds:
        with monkeypatch.context() as patch:
            machine = LaggingMachine(patch, seed)
            Program(machine, seed).run(60)
            assert not machine.cuda.faults, (seed, machine.cuda.faults[:5])
